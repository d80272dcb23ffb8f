"""The grouped GEMM of E4M3 weights in 128 x 128 blocks with E4M3 activations."""

from __future__ import annotations

import triton
import triton.language as tl

from .arith import INTERPRETED
from .blocks import locate
from .decode import e4m3_to_float
from .tile_rows import find_slot, load_inputs, silu_mul, source_rows, store_rows


@triton.jit
def dot_e4m3(a, b, NATIVE: tl.constexpr):
    """float32 a [M, K] @ b [N, K].T of E4M3 values; without an E4M3 type, of their bf16 decodings.

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
    """Of a step's product: those of rows times the weights', one or, WIDE, each output's."""
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
    slots,
    bias,
    M,
    E,
    N,
    K,
    TOPK,
    N_BLOCKS,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
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
    slot, inputs = find_slot(expert, slots, K, HAS_SLOTS)
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
    base = (slot * MATS).to(tl.int64)
    blocks = tl.cdiv(N, 128) * groups
    WIDE: tl.constexpr = BLOCK_N > 128
    own = tl.minimum(cols, N - 1) if WIDE else n0
    scale = w_scale + base * blocks + own // 128 * groups
    if not W_TMA:
        matrix = w + base * N * K
        up = tl.cast(N, tl.int64) * K
        w_tile = matrix + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    for g in tl.range(0, tl.cdiv(inputs, 128), num_stages=STAGES):
        inside = (g * 128 + k < K)[None, :]
        if X_TMA:
            a = x.load([first, g * 128])
        else:
            a = load_inputs(x_tile + g * 128, inside, EVEN_K)
        s = tl.load(scale_rows + g)
        if W_TMA:
            b = w.load([slot * MATS, n0, g * 128]).reshape(BLOCK_N, 128)
        else:
            b = load_inputs(w_tile + g * 128, inside, EVEN_K)
        acc += dot_e4m3(a, b, NATIVE) * _scales(s, scale + g, WIDE)
        if GATED:
            if W_TMA:
                b = w.load([slot * MATS + 1, n0, g * 128]).reshape(BLOCK_N, 128)
            else:
                b = load_inputs(w_tile + (up + g * 128), inside, EVEN_K)
            acc_up += dot_e4m3(a, b, NATIVE) * _scales(s, scale + (blocks + g), WIDE)
    if GATED:
        acc = silu_mul(acc, acc_up)
    store_rows(acc, out, row, hi, cols, N, bias, HAS_BIAS)
