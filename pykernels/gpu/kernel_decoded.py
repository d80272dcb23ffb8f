"""The grouped GEMM of weights that are decoded to bfloat16 on the way (W4A16, W8A16, K-quants).

It computes the transposed tile, weights [BLOCK_N, 32] times inputs [32, BLOCK_M]: Hopper's matrix
instruction takes its left operand from registers, where the decoded weights are, and as few as 8
columns, so one token wastes little. For few rows K is split over programs; their partial sums are
added by a second kernel in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arith import dot
from .blocks import locate
from .decode import decode_pair
from .tile_rows import find_slot, silu_mul, source_rows, store_rows


@triton.jit
def row_pointers(
    w, w_scale, matrix, cols, N, K, ROW_BYTES, KIND: tl.constexpr, GROUP: tl.constexpr
):
    """(uint8 pointers, scale pointers), both [rows], of rows ``cols`` of one matrix."""
    matrix = matrix.to(tl.int64)
    n = tl.minimum(cols, N - 1)
    rows = w + matrix * N * ROW_BYTES + n.to(tl.int64) * ROW_BYTES
    if KIND == "fp8":
        groups = tl.cdiv(K, 128)
        scales = w_scale + matrix * tl.cdiv(N, 128) * groups + n // 128 * groups
    elif KIND == "int8" or KIND == "int4":
        if GROUP == 0:
            scales = w_scale + matrix * N + cols
        else:
            scales = w_scale + matrix * N * tl.cdiv(K, GROUP) + cols
    else:
        scales = n
    return rows, scales


@triton.jit
def gemm_decoded(
    x,
    w,
    w_scale,
    out,
    order,
    starts,
    slots,
    bias,
    M,
    E,
    N,
    K,
    ROW_BYTES,
    TOPK,
    N_BLOCKS,
    K_SPLIT,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As ``gemm_bf16``; weights as ``pykernels.gpu.matrices`` lays them out.

    Program (i, j) of the grid adds up inputs j * K_SPLIT .. (j + 1) * K_SPLIT - 1 and writes to
    ``out`` + j * M * N.

    Args:
        w: uint8 [matrices, N, ROW_BYTES].
        w_scale: bfloat16 or float32; unused by K-quants.
        K_SPLIT: a multiple of BLOCK_K.
        GROUP: inputs of one scale; 0: one scale an output.
    """
    MATS: tl.constexpr = 2 if GATED else 1
    expert, first, hi, n_block = locate(
        tl.program_id(0), starts, E, M, N_BLOCKS, BLOCK_M, GROUP_M, E_PADDED
    )
    if expert >= E:
        return
    slot, inputs = find_slot(expert, slots, K, HAS_SLOTS)
    row = first + tl.arange(0, BLOCK_M)
    cols = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = cols < N
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    source = source_rows(row, hi, order, TOPK, GATHER)
    x_tile = x + source[None, :] * K + tl.arange(0, 32)[:, None]
    rows, scales = row_pointers(w, w_scale, slot * MATS, cols, N, K, ROW_BYTES, KIND, GROUP)
    if GATED:
        rows_up, scales_up = row_pointers(
            w, w_scale, slot * MATS + 1, cols, N, K, ROW_BYTES, KIND, GROUP
        )
    k_lo = tl.program_id(1) * K_SPLIT
    for k0 in tl.range(k_lo, tl.minimum(k_lo + K_SPLIT, inputs), BLOCK_K, num_stages=STAGES):
        for pair in tl.static_range(BLOCK_K // 64):
            k = k0 + pair * 64
            a0, a1 = tl.load(x_tile + k), tl.load(x_tile + (k + 32))
            w0, w1 = decode_pair(rows, scales, there, k, N, K, KIND, GROUP, pair, NATIVE)
            acc = dot(w1, a1, dot(w0, a0, acc))
            if GATED:
                w0, w1 = decode_pair(rows_up, scales_up, there, k, N, K, KIND, GROUP, pair, NATIVE)
                acc_up = dot(w1, a1, dot(w0, a0, acc_up))
    if GATED:
        acc = silu_mul(acc, acc_up)
    out += tl.program_id(1).to(tl.int64) * M * N
    store_rows(acc.T, out, row, hi, cols, N, bias, HAS_BIAS)
