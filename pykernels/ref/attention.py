"""The float truth of attention over paged caches and over ragged batches.

Everywhere: query ``i`` of a sequence with ``Q`` queries and ``K`` keys sits at position
``K - Q + i`` and attends to the keys at its own position and before it, with a window only the last
``window`` of those. A query without a key gives zeros.

``sinks`` (gpt-oss): one more logit of each head in its softmax, neither scaled nor capped, whose
probability falls to no key. Source: gpt-oss's model card (arXiv 2508.10925) and transformers'
``modeling_gpt_oss``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..shapes import Ragged


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
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multi-head latent attention with the key's up-projection absorbed into the query.

    Args:
        q_latent: [B, NH, L] or [B, S, NH, L]: ``q_nope`` times the key half of ``kv_b_proj``.
        q_rope: [B, NH, R] or [B, S, NH, R], rotated.
        latent: [P, page, L], normalised latents; with ``latent_scale``, E4M3.
        rope: [P, page, R], the rotated part that all heads share.
        page_table: int32 [B, pages]: page ``j`` of a sequence is ``latent[page_table[b, j]]``.
        lengths: int32 [B], keys of each sequence, those of this call's S tokens included.
        scale: of the scores, ``(128 + R) ** -0.5`` and YaRN's factor.
        latent_scale: float32 [P, page]; a token's latent is ``latent * latent_scale``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        dtype: of all arithmetic.

    Returns:
        [B, (S,) NH, L] in ``dtype``: latents, still to be multiplied by ``kv_b_proj``'s value half.

    Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.2 and appendix C.
    """
    narrow = q_latent.ndim == 3
    q = torch.cat([q_latent, q_rope], -1).to(dtype)
    q = q[:, None] if narrow else q  # [B, S, NH, L + R]
    out = torch.zeros(*q.shape[:-1], latent.shape[-1], dtype=dtype, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        v = read_pages(latent, page_table[b], length, latent_scale, dtype)[:, None]  # [K, 1, L]
        k = torch.cat([v, read_pages(rope, page_table[b], length, None, dtype)[:, None]], -1)
        out[b] = attend(q[b], k, v, scale=scale, softcap=softcap)
    return out[:, 0] if narrow else out


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
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Grouped-query attention of the newest token(s) over a paged cache.

    Args:
        q: [B, NH, D] or [B, S, NH, D]; head ``h`` reads KV head ``h // (NH / KVH)``.
        k, v: [P, page, KVH, D]; with scales, E4M3.
        page_table: int32 [B, pages].
        lengths: int32 [B], keys of each sequence, those of this call's S tokens included.
        k_scale, v_scale: float32 [P, page, KVH], one a token and head.
        sinks: float [NH].
        window, softcap, dtype: as above.

    Returns:
        [B, (S,) NH, D] in ``dtype``.
    """
    narrow = q.ndim == 3
    q = q[:, None] if narrow else q
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        keys = read_pages(k, page_table[b], length, k_scale, dtype)
        values = read_pages(v, page_table[b], length, v_scale, dtype)
        out[b] = attend(q[b].to(dtype), keys, values, **how)
    return out[:, 0] if narrow else out


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
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of many tokens a sequence, behind a cached prefix if keys outnumber them.

    Args:
        q: [TQ, NH, D].
        k, v: [TK, KVH, D], or [P, page, KVH, D] where ``batch`` has a page table.
        batch: where each sequence's queries and keys lie.
        k_scale, v_scale: float32 [P, page, KVH] of an E4M3 cache.
        sinks: float [NH].
        scale, window, softcap, dtype: as above.

    Returns:
        [TQ, NH, D] in ``dtype``; rows of no sequence (padding) are zeros here.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lengths = zip(batch.q_starts.tolist(), batch.q_lengths.tolist(), strict=True)
    for b, ((start, queries), keys) in enumerate(
        zip(lengths, batch.k_lengths.tolist(), strict=True)
    ):
        if batch.page_table is not None:
            table = batch.page_table[b]
            ks = read_pages(k, table, keys, k_scale, dtype)
            vs = read_pages(v, table, keys, v_scale, dtype)
        else:
            assert batch.k_starts is not None
            first = int(batch.k_starts[b])
            ks, vs = k[first : first + keys].to(dtype), v[first : first + keys].to(dtype)
        rows = slice(start, start + queries)
        out[rows] = attend(q[rows].to(dtype), ks, vs, **how)
    return out


def mla_prefill(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    batch: Ragged,
    *,
    scale: float,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multi-head latent attention with keys and values expanded: cheaper for many queries.

    Args:
        q_nope: [TQ, NH, 128]; q_rope: [TQ, NH, 64].
        k_nope: [TK, NH, 128]; v: [TK, NH, 128], the two halves of ``kv_b_proj(latent)``.
        k_rope: [TK, 64], one for all heads.
        batch: where each sequence's queries and keys lie (keys contiguous: no page table).

    Returns:
        [TQ, NH, 128] in ``dtype``.
    """
    NH = q_nope.shape[1]
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, NH, -1)], -1)
    q = torch.cat([q_nope, q_rope], -1)
    return gqa_prefill(q, k, v, batch, scale=scale, softcap=softcap, dtype=dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence, in the dtype of its inputs: q [Q, NH, D], k [K, KVH, D], v [K, KVH, DV]."""
    (Q, NH, _), (K, KVH, _) = q.shape, k.shape
    if Q == 0 or K == 0:
        return q.new_zeros(Q, NH, v.shape[-1])
    groups = q.unflatten(1, (KVH, NH // KVH))  # [Q, KVH, G, D]
    scores = torch.einsum("qhgd,khd->hgqk", groups, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(K, dtype=torch.int64, device=q.device)
    at = torch.arange(K - Q, K, dtype=torch.int64, device=q.device)
    mask = key <= at[:, None]  # [Q, K]
    if window is not None:
        mask &= key > at[:, None] - window
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(KVH, NH // KVH, 1, 1).expand(-1, -1, Q, 1)
        scores = torch.cat([scores, logits], -1)
    p = torch.softmax(scores, -1)[..., :K].nan_to_num(0.0) * mask  # rows without a key: zeros
    return torch.einsum("hgqk,khd->qhgd", p, v).flatten(1, 2)


def read_pages(
    pages: torch.Tensor,
    table: torch.Tensor,
    length: int,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The first ``length`` tokens of a sequence: [length, ...] in ``dtype``."""
    used = table[: -(-length // pages.shape[1])].long()
    if pages.dtype == torch.float8_e4m3fn:  # not every device can index it
        tokens = pages.view(torch.uint8)[used].view(pages.dtype).flatten(0, 1)[:length].to(dtype)
    else:
        tokens = pages[used].flatten(0, 1)[:length].to(dtype)
    if scales is not None:
        tokens = tokens * scales[used].flatten(0, 1)[:length].to(dtype)[..., None]
    return tokens
