"""Sums of parts in a fixed order: no float atomics, so the same bits in every run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arith import to_bf16


@triton.jit
def add_kernel(parts, out, bias, N, SIZE, PARTS, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * SIZE + i, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + i % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, to_bf16(total), mask=inside)


def add_partials(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """bfloat16 out [M, N] = sum of float32 parts [P, M, N], first to last, plus bias [N]."""
    M, N = out.shape
    block = 512
    add_kernel[(triton.cdiv(M * N, block),)](
        parts, out, bias, N, M * N, parts.shape[0], bias is not None, block
    )
