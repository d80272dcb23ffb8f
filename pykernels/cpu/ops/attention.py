"""Attention over the paged cache on the calling thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...errors import PykernelsError
from ...shapes import Ragged
from ..attention.args import ATTENTION, PAGE
from ..attention.kernel import make_attention
from .cache import Cache, gqa_cache, mla_cache
from .checks import floats, integers, number, optional_floats
from .serial import Record, run_tasks, scratch

_EVER = 1 << 40


def gqa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped-query attention of the newest token(s) over a paged cache, on the calling thread.

    Args:
        q: floats [B, NH, D] or [B, S, NH, D], D a multiple of 16; head ``h`` reads KV head
            ``h // (NH / KVH)``.
        k, v: bfloat16 [P, 64, KVH, D], contiguous; with scales, float8_e4m3fn.
        page_table: int32 or int64 [B, pages]; only the pages that ``lengths`` reach are read.
        lengths: int32 or int64 [B], keys of each sequence, those of this call's S tokens included.
        scale: of the scores.
        k_scale, v_scale: float32 [P, 64, KVH], one a token and head.
        window: a token sees the last so many keys up to its own; None: all.
        sinks: floats [NH], one more logit of each head in its softmax (gpt-oss).

    Returns:
        float32 [B, (S,) NH, D]; a token without a key gives zeros.

    Raises:
        PykernelsError: inputs that do not fit, or a page that the cache does not have.
    """
    cache = gqa_cache(k, v, k_scale, v_scale)
    tokens, shape = _newest("q", q)
    return _decode(
        tokens, shape, cache, page_table, lengths, scale=scale, window=window, sinks=sinks
    )


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    latent_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multi-head latent attention with the key's up-projection absorbed into the query, on the
    calling thread.

    Args:
        q_latent: floats [B, NH, L] or [B, S, NH, L]: ``q_nope`` times the key half of
            ``kv_b_proj``; L and L + R are multiples of 16.
        q_rope: floats [B, NH, R] or [B, S, NH, R], rotated.
        latent: bfloat16 [P, 64, L] and rope [P, 64, R], the two parts of one tensor
            [P, 64, L + R]; with ``latent_scale``, float8_e4m3fn, and rope a tensor of its own.
        rope: bfloat16, the rotated part that all heads share.
        page_table, lengths: as in ``gqa_decode``.
        scale: of the scores, ``(nope + R) ** -0.5`` and YaRN's factor.
        latent_scale: float32 [P, 64]; a token's latent is ``latent * latent_scale``.

    Returns:
        float32 [B, (S,) NH, L]: latents, still to be multiplied by ``kv_b_proj``'s value half.

    Raises:
        PykernelsError: inputs that do not fit, or a page that the cache does not have.

    Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.2 and appendix C.
    """
    cache = mla_cache(latent, rope, latent_scale)
    parts = [_newest(name, x)[0] for name, x in (("q_latent", q_latent), ("q_rope", q_rope))]
    if parts[0].shape[:-1] != parts[1].shape[:-1] or q_latent.shape[:-1] != q_rope.shape[:-1]:
        raise PykernelsError(
            f"q_latent is {list(q_latent.shape)}, q_rope {list(q_rope.shape)}",
            "Give both the same tokens and heads",
        )
    tokens = torch.cat(parts, -1)
    return _decode(tokens, q_latent.shape, cache, page_table, lengths, scale=scale)


def gqa_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Ragged,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of many tokens a sequence over a paged cache, behind a cached prefix if keys
    outnumber them, on the calling thread.

    Args:
        q: floats [TQ, NH, D].
        k, v, k_scale, v_scale, scale, window, sinks: as in ``gqa_decode``.
        batch: where each sequence's queries lie, and its page table.

    Returns:
        float32 [TQ, NH, D]; rows of no sequence (padding) are zeros.

    Raises:
        PykernelsError: inputs that do not fit, keys that are in no pages, or a page that the cache
            does not have.
    """
    if batch.page_table is None:
        raise PykernelsError(
            "keys that are in no pages", f"Give k and v in pages of {PAGE} and a Ragged page_table"
        )
    cache = gqa_cache(k, v, k_scale, v_scale)
    q = floats("q", q, "TQ", "NH", "D")
    starts = integers("q_starts", batch.q_starts, batch.B)
    queries = integers("q_lengths", batch.q_lengths, batch.B)
    if batch.B and (min(starts.min(), queries.min()) < 0 or (starts + queries).max() > len(q)):
        raise PykernelsError(
            f"queries up to row {int((starts + queries).max())} of {len(q)}",
            "Starts and lengths must be rows of q",
        )
    table, lengths = _table(batch.page_table, batch.k_lengths, batch.B, cache)
    sequence = torch.arange(batch.B, dtype=torch.int64, device="cpu").repeat_interleave(queries)
    within = (
        torch.arange(len(sequence), dtype=torch.int64, device="cpu")
        - (queries.cumsum(0) - queries)[sequence]
    )
    step = _Step(sequence, (lengths - queries)[sequence] + within, table, lengths)
    rows = starts[sequence] + within
    out = torch.zeros(*q.shape[:2], cache.D_V, dtype=torch.float32, device="cpu")
    out[rows] = _attend(q[rows], cache, step, scale=scale, window=window, sinks=sinks)
    return out


@dataclass(frozen=True)
class _Step:
    """Which token sees what: ``sequence`` and ``positions`` int64 [T], ``table`` int64 [B, pages],
    ``lengths`` int64 [B]."""

    sequence: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def _newest(name: str, q: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
    """Queries of a decode step as float32 [B, S, NH, D], and the shape that they had."""
    dims = ("B", "S", "NH", "D") if getattr(q, "ndim", 0) == 4 else ("B", "NH", "D")
    x = floats(name, q, *dims)
    return (x if x.ndim == 4 else x[:, None]), x.shape


def _decode(
    q: torch.Tensor,
    shape: torch.Size,
    cache: Cache,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    B, S = q.shape[:2]
    table, lengths = _table(page_table, lengths, B, cache)
    sequence = torch.arange(B, dtype=torch.int64, device="cpu").repeat_interleave(S)
    positions = (lengths[:, None] - S + torch.arange(S, dtype=torch.int64, device="cpu")).flatten()
    step = _Step(sequence, positions, table, lengths)
    out = _attend(q.flatten(0, 1), cache, step, scale=scale, window=window, sinks=sinks)
    return out.view(*shape[:-1], cache.D_V)


def _table(
    page_table: torch.Tensor, lengths: torch.Tensor, B: int, cache: Cache
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page table and the lengths as int64, all pages that are read known to be there."""
    table, lengths = integers("page_table", page_table, B, "pages"), integers("lengths", lengths, B)
    used = (lengths + PAGE - 1) // PAGE
    if B and (lengths.min() < 0 or used.max() > table.shape[1]):
        raise PykernelsError(
            f"lengths from {int(lengths.min())} to {int(lengths.max())}",
            f"The page table has {table.shape[1]} pages of {PAGE} for each sequence",
        )
    read = table[torch.arange(table.shape[1], dtype=torch.int64, device="cpu") < used[:, None]]
    if len(read) and not 0 <= int(read.min()) <= int(read.max()) < cache.pages:
        raise PykernelsError(
            f"the page table names pages {int(read.min())} to {int(read.max())}",
            f"The cache has pages 0 to {cache.pages - 1}",
        )
    return table, lengths


def _attend(
    q: torch.Tensor,
    cache: Cache,
    step: _Step,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """float32 [T, NH, D_V] of q [T, NH, D_K]; a token before its sequence's first key sees none."""
    T, NH, D = q.shape
    if cache.D_K != D or not NH or NH % cache.KVH:
        raise PykernelsError(
            f"queries of {NH} heads of {D} for a cache of {cache.KVH} heads of {cache.D_K}",
            "Heads must have one size, and a KV head as many queries as the next",
        )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise PykernelsError(f"a window of {window!r}", "Give a whole number from 1, or None")
    sinks = optional_floats("sinks", sinks, NH)
    scale = number("scale", scale, 0)
    kernel = make_attention(cache.D_K, cache.D_V, codes=cache.codes)
    out = torch.zeros(T, NH, cache.D_V, dtype=torch.float32, device="cpu")
    sees = step.positions >= 0
    count = int(sees.sum())
    if not count:
        return out
    result = torch.empty(count, NH, cache.D_V, dtype=torch.float32, device="cpu")
    S = len(step.lengths)
    need = kernel.workspace(NH, cache.KVH, count, S, int(step.lengths.sum()))
    record = Record(
        ATTENTION,
        sizes=np.array([count, S], np.int64),
        sequence=step.sequence[sees],
        positions=step.positions[sees],
        page_table=step.table,
        page_table_stride=step.table.shape[1],
        tokens_to=_EVER,
        q=q[sees],
        q_stride=4 * NH * D,
        NH=NH,
        scale=scale,
        window=window,
        sinks=sinks,
        out=result,
        out_stride=4 * NH * cache.D_V,
        items=scratch(need.items_bytes),
        items_capacity=need.items_capacity,
        combines=scratch(need.combines_bytes),
        combines_capacity=need.combines_capacity,
        partial=scratch(need.partial_bytes),
        partial_bytes=need.partial_bytes,
        scratch=scratch(kernel.scratch_bytes),
        scratch_stride=kernel.scratch_bytes,
        **cache.fields,
    )
    for tasks in ((kernel.setup, kernel.run), (kernel.combine_setup, kernel.combine)):
        status = run_tasks(tasks, record.address)
        assert status == 0, "the workspace holds any step of its sizes"
    out[sees] = result
    return out
