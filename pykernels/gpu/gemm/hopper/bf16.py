"""The grouped GEMM of bfloat16 for Hopper, warp-specialized.

The same function as ``gemm_bf16`` for rows in the experts' order; see ``gemm_fp8_hopper`` for how
the warps share the work. The next tile's copies run in parallel with the last one's products and
results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....shapes import SortedPairs
from ...common.gluon_compat import tma_load
from ...common.launch import num_sms
from ...common.tile_scheduler import (
    NUMBER,
    blocks_of,
    next_taken,
    store_tile,
    take_next,
    tile_at,
    to_bf16,
)
from ..tiles import tile_table
from ..weights import Matrices

BLOCK_M = 128
STAGES = 4
"""Each takes 48 KiB: together all of shared memory but what the epilogue takes."""


@gluon.jit
def _produce(
    x,
    w,
    tiles,
    bound,
    N,
    K,
    N_BLOCKS,
    a0,
    a1,
    b,
    full,
    empty,
    nexts,
    n_full,
    n_empty,
    GATED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    blocks = blocks_of(tiles, bound)
    step = 0
    turn = 0
    t = gl.program_id(0)
    while t < blocks * N_BLOCKS:
        expert, first, hi, n_block = tile_at(tiles, bound, t, blocks, N_BLOCKS, GROUP_M)
        if GATED:
            row = expert * 2 * N + n_block * 128
            other = row + N
        else:
            row = expert * N + n_block * 256
            other = row + 128
        steps = gl.cdiv(K, 64)
        for k in range(steps):
            i = step % STAGES
            mbarrier.wait(empty.index(i), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), 384 * 128)
            tma_load(x, [first, k * 64], full.index(i), a0.index(i))
            tma_load(x, [first + 64, k * 64], full.index(i), a1.index(i))
            tma_load(w, [row, k * 64], full.index(i), b.index(i).slice(0, 128))
            tma_load(w, [other, k * 64], full.index(i), b.index(i).slice(128, 128))
            step += 1
        t = take_next(tiles, bound, t, nexts, n_full, n_empty, turn)
        turn += 1


@gluon.jit
def _consume(
    out,
    tiles,
    bound,
    N,
    K,
    N_BLOCKS,
    a,
    b,
    full,
    empty,
    nexts,
    n_full,
    n_empty,
    PART: gl.constexpr,
    GATED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = blocks_of(tiles, bound)
    num_tiles = blocks * N_BLOCKS
    t = gl.program_id(0)
    expert, first, hi, n_block = tile_at(tiles, bound, t, blocks, N_BLOCKS, GROUP_M)
    step = 0
    turn = 0
    while t < num_tiles:
        steps = gl.cdiv(K, 64)
        acc = gl.full([64, 256], 0.0, gl.float32, layout=ACC)
        for k in range(steps):
            i = step % STAGES
            mbarrier.wait(full.index(i), (step // STAGES) & 1)
            acc = warpgroup_mma(a.index(i), b.index(i).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the product before is done
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        row, upto, n = first + 64 * PART, hi, n_block
        # The next tile's table line comes while this one's results go.
        t = next_taken(tiles, t, nexts, n_full, n_empty, turn)
        turn += 1
        expert, first, hi, n_block = tile_at(tiles, bound, t, blocks, N_BLOCKS, GROUP_M)
        if GATED:
            gate, up = acc.reshape([64, 2, 128]).permute((0, 2, 1)).split()
            y = to_bf16(gate / (1 + gl.exp(-gate)) * up)
            store_tile(y, out, row, upto, n * 128, N, WIDE)
        else:
            y0, y1 = to_bf16(acc).reshape([64, 2, 128]).permute((0, 2, 1)).split()
            store_tile(y0, out, row, upto, n * 256, N, WIDE)
            store_tile(y1, out, row, upto, n * 256 + 128, N, WIDE)


@gluon.jit(do_not_specialize=["bound", "N_BLOCKS"])
def gemm_bf16_hopper(
    x,
    w,
    out,
    tiles,
    bound,
    N,
    K,
    N_BLOCKS,
    GATED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As ``gemm_bf16``; rows of x in the experts' order.

    Args:
        x: descriptor of blocks [64, 64] of bfloat16 [S, K].
        w: descriptor of blocks [128, 64] of bfloat16 [matrices * N, K].
        out: bfloat16 [S, N].
        tiles, bound: see ``tile_table``.
    """
    BF16: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], BF16)
    a1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], BF16)
    b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 256, 64], BF16)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    nexts = gl.allocate_shared_memory(gl.int64, [2, 1], NUMBER)
    n_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    n_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(n_full.index(i), count=1)
        mbarrier.init(n_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out,
                    tiles,
                    bound,
                    N,
                    K,
                    N_BLOCKS,
                    a0,
                    b,
                    full,
                    empty,
                    nexts,
                    n_full,
                    n_empty,
                    0,
                    GATED,
                    GROUP_M,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    out,
                    tiles,
                    bound,
                    N,
                    K,
                    N_BLOCKS,
                    a1,
                    b,
                    full,
                    empty,
                    nexts,
                    n_full,
                    n_empty,
                    1,
                    GATED,
                    GROUP_M,
                    STAGES,
                ),
            ),
            (
                _produce,
                (
                    x,
                    w,
                    tiles,
                    bound,
                    N,
                    K,
                    N_BLOCKS,
                    a0,
                    a1,
                    b,
                    full,
                    empty,
                    nexts,
                    n_full,
                    n_empty,
                    GATED,
                    GROUP_M,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def multiply_bf16(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    order: SortedPairs,
    *,
    gated: bool,
    group_m: int,
) -> None:
    """out = x @ w.T of sorted rows x, bfloat16 [S, K]; see ``gemm.grouped.multiply``."""
    tiles, bound = tile_table(order, BLOCK_M)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = TensorDescriptor.from_tensor(x, [64, 64], layout)
    weights: Any = TensorDescriptor.from_tensor(stack.data.view(-1, stack.K), [128, 64], layout)
    n_blocks = triton.cdiv(stack.N, 128 if gated else 256)
    gemm_bf16_hopper[(min(num_sms(x.device), bound * n_blocks),)](
        rows,
        weights,
        out,
        tiles,
        bound,
        stack.N,
        stack.K,
        n_blocks,
        GATED=gated,
        GROUP_M=group_m,
        STAGES=STAGES,
        num_warps=4,
    )
