"""The grouped GEMM of bfloat16 weights: tiles by the tensor memory accelerator, one dot a step."""

from __future__ import annotations

import triton
import triton.language as tl

from .arith import dot
from .blocks import locate
from .tile_rows import find_slot, load_inputs, silu_mul, source_rows, store_rows


@triton.jit(do_not_specialize=["M", "E", "N_BLOCKS"])
def gemm_bf16(
    x,
    w,
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
    """out[row] = x[source(row)] @ w[slot].T, gated: silu(x @ gate.T) * (x @ up.T).

    A step's weight tile is [BLOCK_N, BLOCK_K]; gated, its first half are rows of gate, its second
    one the same rows of up, so that one dot makes both and the halves meet in a thread's registers.

    Args:
        x: bfloat16 [.., K], or with X_TMA a descriptor of blocks [BLOCK_M, BLOCK_K] of it.
        w: bfloat16 [matrices, N, K], or a descriptor of blocks [2 or 1, cols, BLOCK_K] of it.
        out: [.., N].
        order, starts, slots: see ``pykernels.gpu.grouped_gemm``.
    """
    MATS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = BLOCK_N // MATS
    expert, first, hi, n_block = locate(
        tl.program_id(0), starts, E, M, N_BLOCKS, BLOCK_M, GROUP_M, E_PADDED
    )
    if expert >= E:
        return
    slot, inputs = find_slot(expert, slots, K, HAS_SLOTS)
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
        matrix = w + (slot * MATS).to(tl.int64) * N * K
        w_tile = matrix + ((i // COLS) * N + n)[None, :] * K + k[:, None]
    for k0 in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        if X_TMA:
            a = x.load([first, k0])
        else:
            a = load_inputs(x_tile + k0, (k0 + k < K)[None, :], EVEN_K)
        if W_TMA:
            b = w.load([slot * MATS, n_block * COLS, k0]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = load_inputs(w_tile + k0, (k0 + k < K)[:, None], EVEN_K)
        acc = dot(a, b, acc)
    if GATED:
        gate, up = acc.reshape(BLOCK_M, 2, COLS).permute(0, 2, 1).split()
        acc = silu_mul(gate, up)
    store_rows(acc, out, row, hi, cols, N, bias, HAS_BIAS)
