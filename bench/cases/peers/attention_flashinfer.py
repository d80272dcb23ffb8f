"""FlashInfer on the attention cases: the same paged caches, planned beforehand on the host.

Its kernels are compiled by nvcc when they are first planned, half a minute to some minutes each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .attention_torch import Made

BF16 = torch.bfloat16
NAME = "flashinfer"
Set = Sequence[Any]


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch that all wrappers share: they run one after the other. It must begin as zeros."""
    return torch.zeros(256 << 20, dtype=torch.uint8, device=device)


def _pages(table: torch.Tensor, lengths: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """FlashInfer's page table: (ends [B + 1], pages of all, tokens in each's last page)."""
    counts = (lengths + page - 1) // page
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    used = [row[:count] for row, count in zip(table, counts.tolist(), strict=True)]
    return ends, torch.cat(used), ((lengths - 1) % page + 1).int()


def _rows(count: int, each: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count + 1, device=device, dtype=torch.int32) * each


def mla_decode(rotated: Sequence[Set], scale: float) -> Made:
    """`BatchMLAPagedAttentionWrapper`: FlashAttention-3 on Hopper, 2 elsewhere."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    made = []
    for q, q_rope, latent, rope, table, lengths, _, out in rotated:
        ends, pages, _ = _pages(table, lengths, latent.shape[1])
        wrapper = BatchMLAPagedAttentionWrapper(_workspace(q.device))
        wrapper.plan(
            _rows(len(q), 1, q.device),
            ends,
            pages,
            lengths,
            q.shape[1],
            latent.shape[2],
            rope.shape[2],
            latent.shape[1],
            False,
            scale,
            BF16,
            BF16,
        )
        made.append((wrapper, q, q_rope, latent, rope, torch.empty_like(out)))
    return (lambda w, q, r, c, k, out: w.run(q, r, c, k, out=out)), made


def gqa_decode(rotated: Sequence[Set]) -> Made:
    """`BatchDecodeWithPagedKVCacheWrapper`, on tensor cores where heads share a KV head.

    By the kernels that split a sequence: those that it would choose by itself on Hopper do not.
    """
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    made = []
    for q, k, v, table, lengths, _, out in rotated:
        (page, KVH, D), NH = k.shape[1:], q.shape[1]
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            _workspace(q.device), "NHD", use_tensor_cores=NH > KVH, backend="fa2"
        )
        where = _pages(table, lengths, page)
        wrapper.plan(*where, NH, KVH, D, page, q_data_type=BF16, sm_scale=D**-0.5)
        made.append((wrapper, q, (k, v), torch.empty_like(out)))
    return (lambda w, q, kv, out: w.run(q, kv, out=out)), made


def prefill(rotated: Sequence[Set], B: int, Q: int, K: int, window: int, scale: float) -> Made:
    """`BatchPrefillWithRaggedKVCacheWrapper`; MLA's rotated part is joined to heads beforehand."""
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    made = []
    for given in rotated:
        q, k, v = joined(given)
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD")
        wrapper.plan(
            _rows(B, Q, q.device),
            _rows(B, K, q.device),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            v.shape[2],
            causal=True,
            window_left=window - 1,
            sm_scale=scale,
            q_data_type=BF16,
        )
        made.append((wrapper, q, k, v, torch.empty_like(given[-1])))
    return (lambda w, q, k, v, out: w.run(q, k, v, out=out)), made


def joined(given: Set) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a prefill case with whole heads, contiguous."""
    if len(given) != 6:
        q, k, v, _ = given
        return q, k, v
    q_nope, q_rope, k_nope, k_rope, v, _ = given
    shared = k_rope[:, None].expand(-1, k_nope.shape[1], -1)
    return torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, shared], -1), v.contiguous()
