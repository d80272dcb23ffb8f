"""What comes before attention, in plain torch: norms, rotary embedding, the cache's new rows."""

from __future__ import annotations

import torch

from .kv_write import kv_write, mla_write
from .norm import rms_norm


def rope_table(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """cos and sin of each token's angles, times ``scale``: float32 [T, 2, R / 2].

    Args:
        positions: int [T].
        frequencies: float32 [R / 2].
        scale: YaRN's attention factor.
    """
    angles = positions.float()[:, None] * frequencies.float()  # [T, R / 2]
    return torch.stack([angles.cos() * scale, angles.sin() * scale], 1)


def _rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D], its first R numbers turned by ``angles`` [T, 2, R / 2]."""
    cos, sin = angles[:, None, 0].to(x.dtype), angles[:, None, 1].to(x.dtype)
    R = 2 * cos.shape[-1]
    head, rest = x[..., :R], x[..., R:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    both = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([both, rest], -1)


def gqa_rope_cache_write(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    slot_mapping: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    heads: int | None = None,
    starts: tuple[int, int, int] | None = None,
    v_norm: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Norms of queries and keys, rotary embedding of both, and keys and values into their slots.

    Args:
        qkv: [T, (NH + 2 KVH) D] or, with ``heads``, wider: queries, keys, values.
        angles: float32 [T, 2, R / 2] of `rope_table`, R <= D; the first R numbers of a head turn.
        slot_mapping: int [T], ``page * page_size + offset``; what lies outside (-1) is not written.
        k, v: the cache, [P, page, KVH, D]; with scales, E4M3.
        k_scale, v_scale: float32 [P, page, KVH].
        q_norm, k_norm: weights of RMSNorm: [D] for a norm of each head, [NH D] and [KVH D] for one
            of all heads together; None: none.
        eps: of the norms.
        interleaved: pairs are (2i, 2i + 1), not (i, i + R / 2).
        heads: NH; None: what the row, which is no wider then, has beside 2 KVH.
        starts: columns of ``qkv`` where queries, keys and values begin, with ``heads``; None: they
            follow each other, from the row's beginning.
        v_norm: whether the values of a head are normed, too, without a weight.
        dtype: of the arithmetic and of the result.

    Returns:
        The queries, [T, NH, D].
    """
    KVH, D = k.shape[2:]
    NH = qkv.shape[1] // D - 2 * KVH if heads is None else heads
    starts = starts or (0, NH * D, (NH + KVH) * D)
    queries, keys, values = (
        qkv[:, start : start + count * D].to(dtype).unflatten(1, (count, D))
        for start, count in zip(starts, (NH, KVH, KVH), strict=True)
    )
    queries, keys = (
        x
        if weight is None
        else rms_norm(x.reshape(-1, len(weight)), weight, eps, dtype=dtype)[0].view(x.shape)
        for x, weight in ((queries, q_norm), (keys, k_norm))
    )
    if v_norm:
        values = rms_norm(values, values.new_ones(D), eps, dtype=dtype)[0]
    kv_write(_rotated(keys, angles, interleaved), values, slot_mapping, k, v, k_scale, v_scale)
    return _rotated(queries, angles, interleaved)


def mla_rope_cache_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    angles: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_norm: torch.Tensor,
    latent_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Norm of the latents, rotary embedding, and both into the cache; the queries' part turned.

    Args:
        q: [T, NH, R], the part of each query that turns.
        kv: [T, L + R]: latents, and the key part that turns.
        angles: float32 [T, 2, R / 2] of `rope_table`.
        slot_mapping: as above.
        latent: the cache, [P, page, L]; with ``latent_scale``, E4M3.
        rope: [P, page, R].
        kv_norm: [L], the weight of the latents' RMSNorm.
        latent_scale: float32 [P, page].
        eps, interleaved, dtype: as above.

    Returns:
        [T, NH, R].
    """
    L = len(kv_norm)
    normed = rms_norm(kv[:, :L], kv_norm, eps, dtype=dtype)[0]
    turned = _rotated(kv[:, None, L:].to(dtype), angles, interleaved)[:, 0]
    mla_write(normed, turned, slot_mapping, latent, rope, latent_scale)
    return _rotated(q.to(dtype), angles, interleaved)
