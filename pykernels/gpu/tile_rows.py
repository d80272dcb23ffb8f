"""Where a tile's inputs come from and where its results go: shared by the grouped GEMMs."""

from __future__ import annotations

import triton
import triton.language as tl

from .arith import to_bf16


@triton.jit
def source_rows(row, hi, order, TOPK, GATHER: tl.constexpr):
    """int64 rows of x for sorted rows ``row``; rows from ``hi`` on repeat the last one."""
    inside = tl.minimum(row, hi - 1)
    if GATHER:
        inside = tl.load(order + inside) // TOPK
    return inside.to(tl.int64)


@triton.jit
def find_slot(expert, slots, K, HAS_SLOTS: tl.constexpr):
    """(where the expert's matrices lie, inputs to add up): none for an expert that lies nowhere."""
    slot, inputs = expert, expert * 0 + K
    if HAS_SLOTS:
        slot = tl.load(slots + expert)
        inputs = tl.where(slot < 0, 0, inputs)
    return slot, inputs


@triton.jit
def load_inputs(tile, inside, EVEN_K: tl.constexpr):
    """A tile of pointers; with EVEN_K no step goes beyond K and nothing is masked."""
    if EVEN_K:
        value = tl.load(tile)
    else:
        value = tl.load(tile, mask=inside, other=0.0)
    return value


@triton.jit
def silu_mul(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def store_rows(value, out, row, hi, cols, N, bias, HAS_BIAS: tl.constexpr):
    """Writes float32 [rows, cols], plus ``bias`` [N], to rows of ``out`` [.., N] in its dtype."""
    if HAS_BIAS:
        value += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * N + cols[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        value = to_bf16(value)
    tl.store(at, value, mask=(row < hi)[:, None] & (cols < N)[None, :])
