"""Products of many rows with K-quants that are decoded to bfloat16 in device memory beforehand.

Each block of rows decodes the weights again. From some number of rows on it pays to write bfloat16
once and to multiply that: the values are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..shapes import SortedSlots
from .decode import decode_pair
from .kernel_decoded import row_pointers
from .launch import arch
from .matrices import Matrices, scale_every, scale_words
from .plan_types import GemmPlan
from .quantize import NATIVE_FP8

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRATCH = 256 << 20
"""Most bytes of decoded weights at a time, or one expert's."""
_ROWS, _INPUTS = 32, 512


@triton.jit(do_not_specialize=["first"])
def unpack_kernel(
    w, w_scale, out, starts, slots, first, COUNT, N, K, ROW_BYTES, K_BLOCKS,
    MATS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """out [.., COUNT, K] = the matrices of experts from ``first`` on, or with no ``starts`` rows
    ``first`` .. of one matrix. Experts without rows or slot are passed over."""
    i = tl.program_id(1)
    own = tl.program_id(0) // K_BLOCKS * ROWS + tl.arange(0, ROWS)
    k0 = tl.program_id(0) % K_BLOCKS * INPUTS
    if starts is None:
        wanted, matrix, n = True, i, own + first
    else:
        expert = first + i // MATS
        wanted = tl.load(starts + expert) < tl.load(starts + expert + 1)
        slot = expert
        if slots is not None:
            slot = tl.load(slots + expert)
        wanted, matrix, n = wanted & (slot >= 0), slot * MATS + i % MATS, own
    if wanted:
        rows, scales = row_pointers(w, w_scale, matrix, n, N, K, ROW_BYTES, KIND, GROUP)
        there = own < COUNT
        to = out + (i.to(tl.int64) * COUNT + own)[:, None] * K + tl.arange(0, 32)[None, :]
        for k1 in tl.range(k0, tl.minimum(k0 + INPUTS, K), 256):
            for pair in tl.static_range(4):
                k = k1 + pair * 64
                if k < K:
                    a, b = decode_pair(rows, scales, there, k, N, K, KIND, GROUP, pair, NATIVE)
                    tl.store(to + k, a, mask=there[:, None])
                    tl.store(to + (k + 32), b, mask=there[:, None])


def _unpack(
    stack: Matrices, out: torch.Tensor, first: int, order: SortedSlots | None,
    table: torch.Tensor | None, mats: int,
) -> Matrices:  # fmt: skip
    count, rows, K = out.shape
    data = stack.data.view(torch.uint8)
    k_blocks = triton.cdiv(K, _INPUTS)
    unpack_kernel[(triton.cdiv(rows, _ROWS) * k_blocks, count)](
        data, scale_words(stack), out, order and order.starts, table, first, rows, stack.N, K,
        data.shape[-1], k_blocks, MATS=mats, KIND=stack.kind,
        GROUP=scale_every(stack),
        NATIVE=arch(out.device) >= NATIVE_FP8, ROWS=_ROWS, INPUTS=_INPUTS, num_warps=4,
    )  # fmt: skip
    return Matrices("bf16", rows, K, 0, out)


def _runs(total: int, size: int, limit: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of runs of at most ``limit`` bytes; starts are multiples of four."""
    count = max(1, limit // size)
    count = min(total, count - count % 4 if count > 4 else count)
    for first in range(0, total, count):
        yield first, min(count, total - first)


def multiply_unpacked(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    order: SortedSlots | None,
    table: torch.Tensor | None,
    gated: bool,
    bias: torch.Tensor | None,
    limit: int = SCRATCH,
) -> None:
    """See ``grouped_gemm.multiply``; ``plan`` is for bfloat16 weights.

    Args:
        limit: bytes of decoded weights at a time, if not less than one expert's or 256 rows'.
    """
    from .grouped_gemm import multiply

    plan, mats = replace(plan, unpack=False), 2 if gated else 1
    if order is None:
        for n, rows in _runs(stack.N, 2 * stack.K, max(limit, 512 * stack.K)):
            decoded = _unpack(stack, _scratch(x, 1, rows, stack.K), n, None, None, 1)
            whole = rows == stack.N
            part = out if whole else torch.empty_like(out[:, :rows])
            multiply(x, decoded, part, plan, bias=None if bias is None else bias[n : n + rows])
            if not whole:
                out[:, n : n + rows] = part
        return
    E = order.starts.shape[0] - 1
    for e, count in _runs(E, 2 * mats * stack.N * stack.K, limit):
        scratch = _scratch(x, mats * count, stack.N, stack.K)
        decoded = _unpack(stack, scratch, e, order, table, mats)
        here = None
        if table is not None:
            own = torch.arange(count, dtype=torch.int32, device=x.device)
            here = torch.where(table[e : e + count] < 0, -1, own)
        some = replace(order, starts=order.starts[e : e + count + 1])
        multiply(x, decoded, out, plan, order=some, table=here, gated=gated)


def _scratch(x: torch.Tensor, count: int, N: int, K: int) -> torch.Tensor:
    return torch.empty(count, N, K, dtype=torch.bfloat16, device=x.device)
