"""The grouped GEMM in plain Triton: bfloat16, E4M3, and weights that are dequantized on the way.

``gemm_bf16`` and ``gemm_fp8`` (weights in blocks of 128 x 128, E4M3 activations) load their tiles
by the tensor memory accelerator where there is one. ``gemm_dequant`` (W4A16, W8A16, K-quants)
computes the transposed tile, weights [BLOCK_N, 32] times inputs [32, BLOCK_M]: Hopper's matrix
instruction takes its left operand from registers, where the dequantized weights are, and as few as
8 columns, so one token wastes little. For few rows K is split over programs; their partial sums are
added by a second kernel in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.bf16 import INTERPRETED, dot
from ..common.dequant import dequantize_pair, e4m3_to_float
from .tiles import load_bias, load_inputs, locate, source_rows, store_rows, swiglu


@triton.jit(do_not_specialize=["M", "E", "N_BLOCKS"])
def gemm_bf16(
    x,
    w,
    out,
    order,
    starts,
    bias,
    M,
    E,
    N,
    K,
    TOPK,
    N_BLOCKS,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    W_TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[row] = x[source(row)] @ w[expert].T + bias[expert], gated: ``swiglu`` of gate's and up's.

    A step's weight tile is [BLOCK_N, BLOCK_K]; gated, its first half are rows of gate, its second
    one the same rows of up, so that one dot makes both and the halves meet in a thread's registers.

    Args:
        x: bfloat16 [.., K], or with X_TMA a descriptor of blocks [BLOCK_M, BLOCK_K] of it.
        w: bfloat16 [matrices, N, K], or a descriptor of blocks [2 or 1, cols, BLOCK_K] of it.
        out: [.., N].
        order, starts, bias: see ``pykernels.gpu.gemm.grouped``.
    """
    MATS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = BLOCK_N // MATS
    expert, first, hi, n_block = locate(
        tl.program_id(0), starts, E, M, N_BLOCKS, BLOCK_M, GROUP_M, E_PADDED
    )
    if expert >= E:
        return
    row = first + tl.arange(0, BLOCK_M)
    cols = n_block * COLS + tl.arange(0, COLS)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    if not X_TMA:
        source = source_rows(row, hi, order, TOPK, GATHER)
        x_tile = x + source[:, None] * K + k[None, :]
    if not W_TMA:
        i = tl.arange(0, BLOCK_N)
        n = tl.minimum(n_block * COLS + i % COLS, N - 1).to(tl.int64)
        matrix = w + (expert * MATS).to(tl.int64) * N * K
        w_tile = matrix + ((i // COLS) * N + n)[None, :] * K + k[:, None]
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if X_TMA:
            a = x.load([first, k0])
        else:
            a = load_inputs(x_tile + k0, (k0 + k < K)[None, :], EVEN_K)
        if W_TMA:
            b = w.load([expert * MATS, n_block * COLS, k0]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = load_inputs(w_tile + k0, (k0 + k < K)[:, None], EVEN_K)
        acc = dot(a, b, acc)
    if GATED:
        gate, up = acc.reshape(BLOCK_M, 2, COLS).permute(0, 2, 1).split()
        if HAS_BIAS:
            gate += load_bias(bias, expert * 2, cols, N)[None, :]
            up += load_bias(bias, expert * 2 + 1, cols, N)[None, :]
        acc = swiglu(gate, up, ACT)
    elif HAS_BIAS:
        acc += load_bias(bias, expert, cols, N)[None, :]
    store_rows(acc, out, row, hi, cols, N)


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
    elif KIND == "int8" or KIND == "int4" or KIND == "mxfp4":
        if GROUP == 0:
            scales = w_scale + matrix * N + cols
        else:
            scales = w_scale + matrix * N * tl.cdiv(K, max(GROUP, 64)) + cols
    else:
        scales = n
    return rows, scales


@triton.jit(do_not_specialize=["M", "E", "N_BLOCKS"])
def gemm_dequant(
    x,
    w,
    w_scale,
    out,
    order,
    starts,
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
    ACT: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    """As ``gemm_bf16``; weights as ``pykernels.gpu.gemm.weights`` lays them out.

    Program (i, j) of the grid adds up inputs j * K_SPLIT .. (j + 1) * K_SPLIT - 1 and writes to
    ``out`` + j * M * N.

    Args:
        w: uint8 [matrices, N, ROW_BYTES].
        w_scale: int32 (see ``gemm.weights``) or, for fp8, float32; unused by K-quants.
        K_SPLIT: a multiple of BLOCK_K.
        GROUP: inputs of one scale; 0: one scale an output.
    """
    MATS: tl.constexpr = 2 if GATED else 1
    expert, first, hi, n_block = locate(
        tl.program_id(0), starts, E, M, N_BLOCKS, BLOCK_M, GROUP_M, E_PADDED
    )
    if expert >= E:
        return
    row = first + tl.arange(0, BLOCK_M)
    cols = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    source = source_rows(row, hi, order, TOPK, GATHER)
    x_tile = x + source[None, :] * K + tl.arange(0, 32)[:, None]
    rows, scales = row_pointers(w, w_scale, expert * MATS, cols, N, K, ROW_BYTES, KIND, GROUP)
    if GATED:
        rows_up, scales_up = row_pointers(
            w, w_scale, expert * MATS + 1, cols, N, K, ROW_BYTES, KIND, GROUP
        )
    k_lo = tl.program_id(1) * K_SPLIT
    for k0 in tl.range(k_lo, tl.minimum(k_lo + K_SPLIT, K), BLOCK_K, num_stages=STAGES):
        for pair in tl.static_range(BLOCK_K // 64):
            k = k0 + pair * 64
            a0, a1 = tl.load(x_tile + k), tl.load(x_tile + (k + 32))
            w0, w1 = dequantize_pair(rows, scales, mask, k, N, K, KIND, GROUP, pair, NATIVE)
            acc = dot(w1, a1, dot(w0, a0, acc))
            if GATED:
                w0, w1 = dequantize_pair(
                    rows_up, scales_up, mask, k, N, K, KIND, GROUP, pair, NATIVE
                )
                acc_up = dot(w1, a1, dot(w0, a0, acc_up))
    if HAS_BIAS:
        acc += load_bias(bias, expert * MATS, cols, N)[:, None]
    if GATED:
        if HAS_BIAS:
            acc_up += load_bias(bias, expert * MATS + 1, cols, N)[:, None]
        acc = swiglu(acc, acc_up, ACT)
    out += tl.program_id(1).to(tl.int64) * M * N
    store_rows(acc.T, out, row, hi, cols, N)


@triton.jit
def dot_e4m3(a, b, NATIVE: tl.constexpr):
    """float32 a [M, K] @ b [N, K].T of E4M3 values; without an E4M3 type, of the same in bf16.

    Every E4M3 value is a bfloat16 one, so both are exact products.
    """
    if NATIVE:
        product = tl.dot(a, b.T)
    elif INTERPRETED:
        product = tl.dot(e4m3_to_float(a), e4m3_to_float(b).T)
    else:
        product = tl.dot(e4m3_to_float(a).to(tl.bfloat16), e4m3_to_float(b).to(tl.bfloat16).T)
    return product


@triton.jit
def _scales(rows, at, WIDE: tl.constexpr):
    """Scales of a step's product: the rows' times the weights', one or, WIDE, each output's."""
    if WIDE:
        both = rows[:, None] * tl.load(at)[None, :]
    else:
        both = (rows * tl.load(at))[:, None]
    return both


@triton.jit(do_not_specialize=["M", "E", "N_BLOCKS"])
def gemm_fp8(
    x,
    x_scale,
    w,
    w_scale,
    out,
    order,
    starts,
    bias,
    M,
    E,
    N,
    K,
    TOPK,
    N_BLOCKS,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NATIVE: tl.constexpr,
    W_TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As ``gemm_bf16``; the product of each 128 inputs is scaled and added in float32.

    DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.2: one activation scale a token
    and 128 inputs, one weight scale a block of 128 x 128: up to a BLOCK_N of 128 a step's is one
    number.

    Args:
        x: E4M3 [.., K] (uint8 where NATIVE is off), or a descriptor of blocks [BLOCK_M, 128].
        x_scale: float32 [.., ceil(K / 128)].
        w: E4M3 [matrices, N, K] (or uint8), or a descriptor of blocks [1, BLOCK_N, 128].
        w_scale: float32 [matrices, ceil(N / 128), ceil(K / 128)].
    """
    MATS: tl.constexpr = 2 if GATED else 1
    expert, first, hi, n_block = locate(
        tl.program_id(0), starts, E, M, N_BLOCKS, BLOCK_M, GROUP_M, E_PADDED
    )
    if expert >= E:
        return
    n0 = n_block * BLOCK_N
    row = first + tl.arange(0, BLOCK_M)
    cols = n0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = acc
    k = tl.arange(0, 128)
    groups = tl.cdiv(K, 128)
    source = source_rows(row, hi, order, TOPK, GATHER)
    x_tile = x
    if not X_TMA:
        x_tile = x + source[:, None] * K + k[None, :]
    scale_rows = x_scale + source * groups
    base = (expert * MATS).to(tl.int64)
    blocks = tl.cdiv(N, 128) * groups
    WIDE: tl.constexpr = BLOCK_N > 128
    own = tl.minimum(cols, N - 1) if WIDE else n0
    scale = w_scale + base * blocks + own // 128 * groups
    if not W_TMA:
        matrix = w + base * N * K
        up = tl.cast(N, tl.int64) * K
        w_tile = matrix + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    for g in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
        inside = (g * 128 + k < K)[None, :]
        if X_TMA:
            a = x.load([first, g * 128])
        else:
            a = load_inputs(x_tile + g * 128, inside, EVEN_K)
        s = tl.load(scale_rows + g)
        if W_TMA:
            b = w.load([expert * MATS, n0, g * 128]).reshape(BLOCK_N, 128)
        else:
            b = load_inputs(w_tile + g * 128, inside, EVEN_K)
        acc += dot_e4m3(a, b, NATIVE) * _scales(s, scale + g, WIDE)
        if GATED:
            if W_TMA:
                b = w.load([expert * MATS + 1, n0, g * 128]).reshape(BLOCK_N, 128)
            else:
                b = load_inputs(w_tile + (up + g * 128), inside, EVEN_K)
            acc_up += dot_e4m3(a, b, NATIVE) * _scales(s, scale + (blocks + g), WIDE)
    if HAS_BIAS:
        acc += load_bias(bias, expert * MATS, cols, N)[None, :]
    if GATED:
        if HAS_BIAS:
            acc_up += load_bias(bias, expert * MATS + 1, cols, N)[None, :]
        acc = swiglu(acc, acc_up, ACT)
    store_rows(acc, out, row, hi, cols, N)
