"""Sums over slots in a fixed order: no float atomics, so the same bits in every run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def sum_rows(y, out, bias, N, PARTS, OUTER, INNER, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over i of y[t * OUTER + i * INNER]: one program a row and BLOCK outputs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(PARTS):
        at = y + (row * OUTER + i * INNER) * N + n
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=inside)


def _launch(
    y: torch.Tensor, out: torch.Tensor, parts: int, strides: tuple[int, int], bias: object
) -> None:
    rows, N = out.shape
    block = min(_BLOCK, triton.next_power_of_2(N))
    if rows and N:
        grid = (rows, triton.cdiv(N, block))
        sum_rows[grid](y, out, bias, N, parts, *strides, bias is not None, block)


def combine(y: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, N] = sum of each token's slots of y [T * topk, N], added in float32 by rank."""
    topk = y.shape[0] // out.shape[0] if out.shape[0] else 0
    _launch(y, out, topk, (topk, 1), None)


def add_partials(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """out [M, N] = sum of parts float32 [P, M, N], in order, plus bias [N]."""
    _launch(parts, out, parts.shape[0], (1, parts.shape[1]), bias)
