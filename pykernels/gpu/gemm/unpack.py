"""Weights to bfloat16 in device memory, for products of many rows.

Each block of rows dequantizes the weights again. From some number of rows on it pays to write
bfloat16 once and to multiply that: the values are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ...shapes import SortedPairs
from ..common.dequant import dequantize_pair
from ..common.launch import arch
from ..quantize import NATIVE_FP8
from .triton_kernels import row_pointers
from .weights import Matrices, scale_every, scale_words

_ROWS, _INPUTS = 32, 512


@triton.jit(do_not_specialize=["first"])
def unpack_kernel(
    w,
    w_scale,
    out,
    starts,
    first,
    COUNT,
    N,
    K,
    ROW_BYTES,
    K_BLOCKS,
    MATS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """out [.., COUNT, K] = the matrices of experts from ``first`` on, or with no ``starts`` rows
    ``first`` .. of one matrix. Experts without rows are passed over."""
    i = tl.program_id(1)
    own = tl.program_id(0) // K_BLOCKS * ROWS + tl.arange(0, ROWS)
    k0 = tl.program_id(0) % K_BLOCKS * INPUTS
    if starts is None:
        wanted, matrix, n = True, i, own + first
    else:
        expert = first + i // MATS
        wanted = tl.load(starts + expert) < tl.load(starts + expert + 1)
        matrix, n = expert * MATS + i % MATS, own
    if wanted:
        rows, scales = row_pointers(w, w_scale, matrix, n, N, K, ROW_BYTES, KIND, GROUP)
        mask = own < COUNT
        to = out + (i.to(tl.int64) * COUNT + own)[:, None] * K + tl.arange(0, 32)[None, :]
        for k1 in tl.range(k0, tl.minimum(k0 + INPUTS, K), 256):
            for pair in tl.static_range(4):
                k = k1 + pair * 64
                if k < K:
                    a, b = dequantize_pair(rows, scales, mask, k, N, K, KIND, GROUP, pair, NATIVE)
                    tl.store(to + k, a, mask=mask[:, None])
                    tl.store(to + (k + 32), b, mask=mask[:, None])


def unpack(
    stack: Matrices,
    out: torch.Tensor,
    first: int,
    order: SortedPairs | None = None,
    mats: int = 1,
) -> Matrices:
    """As many matrices as ``out``, bfloat16 [matrices, rows, K], has room for, from ``first`` on.

    Args:
        first: an expert, or without ``order`` a row of the only matrix.
        mats: matrices of an expert.
    """
    count, rows, K = out.shape
    data = stack.data.view(torch.uint8)
    k_blocks = triton.cdiv(K, _INPUTS)
    unpack_kernel[(triton.cdiv(rows, _ROWS) * k_blocks, count)](
        data,
        scale_words(stack),
        out,
        order and order.starts,
        first,
        rows,
        stack.N,
        K,
        data.shape[-1],
        k_blocks,
        MATS=mats,
        KIND=stack.kind,
        GROUP=scale_every(stack),
        NATIVE=arch(out.device) >= NATIVE_FP8,
        ROWS=_ROWS,
        INPUTS=_INPUTS,
        num_warps=4,
    )
    return Matrices("bf16", rows, K, 0, out)


def runs(total: int, size: int, limit: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of runs of at most ``limit`` bytes; starts are multiples of four."""
    count = max(1, limit // size)
    count = min(total, count - count % 4 if count > 4 else count)
    for first in range(0, total, count):
        yield first, min(count, total - first)
