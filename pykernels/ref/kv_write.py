"""Keys and values into a paged cache, and latents out of one, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

E4M3_MAX = 448.0


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes (as float8_e4m3fn) of [..., D] and one float32 scale a row [...].

    A scale is the largest magnitude of the row's numbers over 448, 1 if that is 0. NaN stays NaN,
    the numbers beside it stay what they are.
    """
    x = x.float()
    top = x.abs().masked_fill(x.isnan(), 0).amax(-1)
    # By a tensor: torch divides by a Python number on a GPU as a product with its reciprocal.
    scale = top / torch.full_like(top, E4M3_MAX)
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (x / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)  # a subnormal scale is inexact
    return codes.to(torch.float8_e4m3fn), scale


def _write(
    rows: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """Rows [T, ...] to the ``slot_mapping`` of [P, page, ...]; slots outside are left out."""
    here = (slot_mapping >= 0) & (slot_mapping < cache.shape[0] * cache.shape[1])
    at, rows = slot_mapping[here].long(), rows[here]
    if scales is None:
        cache.flatten(0, 1)[at] = rows.to(cache.dtype)
        return
    codes, scale = quantize_rows(rows)
    cache.view(torch.uint8).flatten(0, 1)[at] = codes.view(torch.uint8)
    scales.flatten(0, 1)[at] = scale


def mla_write(
    latent: torch.Tensor,
    rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_scale: torch.Tensor | None = None,
) -> None:
    """Writes latents and their rotated parts to their slots in the cache of `mla_decode`.

    Args:
        latent: [T, L].
        rope: [T, R].
        slot_mapping: int [T], ``page * page_size + offset``; a token whose slot is outside the
            cache (negative: padding; or ``P * page_size`` and more) is written nowhere.
        latent_cache: [P, page, L]; with ``latent_scale``, E4M3.
        rope_cache: [P, page, R].
        latent_scale: float32 [P, page].
    """
    _write(latent, slot_mapping, latent_cache, latent_scale)
    _write(rope, slot_mapping, rope_cache, None)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes keys and values to their slots in the cache of `gqa_decode`.

    Args:
        k, v: [T, KVH, D].
        slot_mapping: as above.
        k_cache, v_cache: [P, page, KVH, D]; with scales, E4M3.
        k_scale, v_scale: float32 [P, page, KVH], one a token and head.
    """
    _write(k, slot_mapping, k_cache, k_scale)
    _write(v, slot_mapping, v_cache, v_scale)


def cache_write(
    rows: Sequence[torch.Tensor], cache: Sequence[torch.Tensor], slot_mapping: torch.Tensor
) -> None:
    """Writes rows, coded as the cache is, to their slots in every part of a layer's cache.

    Args:
        rows: [T, *row] of each part.
        cache: of the same dtypes, [P, page, *row].
        slot_mapping: as above.
    """
    slots = cache[0].shape[0] * cache[0].shape[1]
    (at,) = torch.where((slot_mapping >= 0) & (slot_mapping < slots))
    for source, target in zip(rows, cache, strict=True):
        values, there = source.flatten(1), target.flatten(0, 1).flatten(1)
        if source.dtype == torch.float8_e4m3fn:  # indices take no such numbers
            values, there = values.view(torch.uint8), there.view(torch.uint8)
        there[slot_mapping[at].long()] = values[at]


def mla_read(
    latent: torch.Tensor,
    rope: torch.Tensor,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    latent_scale: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's first tokens as rows; token ``j`` of ``b`` becomes row ``starts[b] + j``.

    Args:
        latent: [P, page, L]; with ``latent_scale``, E4M3.
        rope: [P, page, R].
        page_table: int32 [B, pages].
        starts, lengths: int32 [B].
        rows: of the results.
        latent_scale: float32 [P, page].
        out: ([rows, L], [rows, R]) of rope's dtype; rows of no token are left as they are.
    """
    widths = latent.shape[2], rope.shape[2]
    rows_ = out or (rope.new_zeros(rows, widths[0]), rope.new_zeros(rows, widths[1]))
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        table = page_table[b, : -(-length // latent.shape[1])].long()
        here = slice(start, start + length)
        values = latent[table].flatten(0, 1)[:length].float()
        if latent_scale is not None:
            values = values * latent_scale[table].flatten()[:length, None]
        rows_[0][here] = values.to(rope.dtype)
        rows_[1][here] = rope[table].flatten(0, 1)[:length]
    return rows_
