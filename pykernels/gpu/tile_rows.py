"""Where a tile's inputs come from and where its results go: shared by the grouped GEMMs."""

from __future__ import annotations

import triton
import triton.language as tl


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
def silu_mul(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def store_rows(value, out, row, hi, cols, N, order, row_weights, bias, EPILOGUE: tl.constexpr):
    """Writes float32 [rows, cols] to ``out`` [.., N], in its dtype.

    EPILOGUE "rows": where they are; "scatter": times the router's weight, to the row's slot
    (token * topk + rank); "bias": where they are, plus ``bias`` [N].
    """
    there = row < hi
    to = row
    if EPILOGUE == "scatter":
        to = tl.load(order + row, mask=there, other=0)
        value = value * tl.load(row_weights + to, mask=there, other=0.0)[:, None]
    if EPILOGUE == "bias":
        value += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    at = out + to.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=there[:, None] & (cols < N)[None, :])
