"""The grouped GEMM of E4M3 blocks written out for Hopper: copies and products by different warps.

The same function as ``kernel_fp8``, in Gluon. A producer warp asks the tensor memory accelerator
for tiles of 128 inputs; two warpgroups multiply 64 rows each. While one of them scales its product
and adds it in float32, the other one's product runs. Programs walk over tiles, so that the next
tile's copies run beside the last one's epilogue.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..shapes import SortedSlots
from .matrices import Matrices
from .tiles import tile_table

# Triton 3.6 and 3.9 have different names for the same.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

BLOCK_M = 128


@gluon.jit
def _tile(tiles, t, blocks, N_BLOCKS, GROUP_M: gl.constexpr):
    """(slot, first row, row behind the expert's last, N block) of tile ``t``."""
    group = t // (GROUP_M * N_BLOCKS)
    inside = t % (GROUP_M * N_BLOCKS)
    rows = gl.minimum(blocks - group * GROUP_M, GROUP_M)
    line = tiles + 4 * (group * GROUP_M + inside % rows)
    return gl.load(line), gl.load(line + 1), gl.load(line + 2), inside // rows


@gluon.jit
def _produce(
    x, w, tiles, bound, N, K, N_BLOCKS, a0, a1, b0, b1, full, more, empty,
    GATED: gl.constexpr, GROUP_M: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    blocks = gl.load(tiles + 4 * bound)
    step = 0
    for t in range(gl.program_id(0), blocks * N_BLOCKS, gl.num_programs(0)):
        slot, first, hi, n_block = _tile(tiles, t, blocks, N_BLOCKS, GROUP_M)
        if GATED:
            row = slot * 2 * N + n_block * 128
            other = row + N
        else:
            row = slot * N + n_block * (128 * HALVES)
            other = row + 128
        groups = gl.where(slot < 0, 0, gl.cdiv(K, 128))
        for g in range(groups):
            i = step % STAGES
            mbarrier.wait(empty.index(i), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), 2 * 128 * 128)
            tma_load(x, [first, g * 128], full.index(i), a0.index(i))
            tma_load(x, [first + 64, g * 128], full.index(i), a1.index(i))
            tma_load(w, [row, g * 128], full.index(i), b0.index(i))
            if HALVES == 2:
                mbarrier.expect(more.index(i), 128 * 128)
                tma_load(w, [other, g * 128], more.index(i), b1.index(i))
            step += 1


@gluon.jit
def _store(y, out, first, hi, n0, N):
    """Rows of a [64, 128] tile as bfloat16; through shared memory, so that stores are whole."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    y = gl.convert_layout(y.to(gl.bfloat16), WIDE)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    col = n0 + gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))
    at = out + (row.to(gl.int64) * N)[:, None] + col[None, :]
    gl.store(at, y, mask=(row < hi)[:, None] & (col < N)[None, :])


@gluon.jit
def _consume(
    x_scale, w_scale, out, order, tiles, bound, N, K, TOPK, N_BLOCKS, a, b0, b1, full, more, empty,
    PART: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    blocks = gl.load(tiles + 4 * bound)
    zeros = gl.full([64, 128], 0.0, gl.float32, layout=ACC)
    width = gl.cdiv(K, 128)
    step = 0
    for t in range(gl.program_id(0), blocks * N_BLOCKS, gl.num_programs(0)):
        slot, first, hi, n_block = _tile(tiles, t, blocks, N_BLOCKS, GROUP_M)
        first += 64 * PART
        groups = gl.where(slot < 0, 0, width)
        row = gl.minimum(first + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)), hi - 1)
        if GATED:
            row = gl.load(order + row) // TOPK
        s_at = x_scale + row * width
        n_scales = gl.cdiv(N, 128)
        if GATED:
            line = slot * 2 * n_scales + n_block
            other = line + n_scales
        else:
            n = n_block * HALVES
            line = slot * n_scales + n
            other = line + gl.where(n + 1 < n_scales, 1, 0)
        w0_at = w_scale + line * width
        w1_at = w_scale + other * width
        s = gl.load(s_at)
        s0 = gl.load(w0_at, mask=groups > 0, other=0.0)
        s1 = gl.load(w1_at, mask=groups > 0, other=0.0)
        acc0 = zeros
        acc1 = zeros
        for g in range(groups):
            i = step % STAGES
            mbarrier.wait(full.index(i), (step // STAGES) & 1)
            p = warpgroup_mma(a.index(i), b0.index(i).permute((1, 0)), zeros, use_acc=False,
                              is_async=True)  # fmt: skip
            # The next scales are asked for while the product runs.
            ahead = gl.minimum(g + 1, groups - 1)
            s_next = gl.load(s_at + ahead)
            s0_next = gl.load(w0_at + ahead)
            s1_next = gl.load(w1_at + ahead)
            p = warpgroup_mma_wait(0, deps=[p])
            if HALVES == 2:
                acc0 += p * (s * s0)[:, None]
                acc0 = warpgroup_mma_wait(0, deps=[acc0])  # or LLVM adds behind the next product
                # Across this wait ptxas moves nothing: products share their registers.
                mbarrier.wait(more.index(i), (step // STAGES) & 1)
                p = warpgroup_mma(a.index(i), b1.index(i).permute((1, 0)), zeros, use_acc=False,
                                  is_async=True)  # fmt: skip
                p = warpgroup_mma_wait(0, deps=[p])
                mbarrier.arrive(empty.index(i), count=1)
                acc1 += p * (s * s1)[:, None]
            else:
                mbarrier.arrive(empty.index(i), count=1)
                acc0 += p * (s * s0)[:, None]
            s = s_next
            s0 = s0_next
            s1 = s1_next
            step += 1
        if GATED:
            _store(acc0 / (1 + gl.exp(-acc0)) * acc1, out, first, hi, n_block * 128, N)
        else:
            _store(acc0, out, first, hi, n_block * 128 * HALVES, N)
            if HALVES == 2:
                _store(acc1, out, first, hi, n_block * 256 + 128, N)


@gluon.jit(do_not_specialize=["bound", "N_BLOCKS"])
def gemm_fp8_hopper(
    x, x_scale, w, w_scale, out, order, tiles, bound, N, K, TOPK, N_BLOCKS,
    GATED: gl.constexpr, GROUP_M: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As ``gemm_fp8``; rows of x in the experts' order.

    Args:
        x: descriptor of blocks [64, 128] of E4M3 [S, K].
        x_scale: float32 [.., ceil(K / 128)]; gated, of tokens, otherwise of sorted rows.
        w: descriptor of blocks [128, 128] of E4M3 [matrices * N, K].
        tiles, bound: see ``tile_table``.
        HALVES: tiles of 128 outputs of a program; gated, gate and up.
    """
    E4M3: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], E4M3)
    a1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], E4M3)
    b0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], E4M3)
    b1 = b0
    if HALVES == 2:
        b1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], E4M3)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    more = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(more.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_consume, (x_scale, w_scale, out, order, tiles, bound, N, K, TOPK, N_BLOCKS,
                        a0, b0, b1, full, more, empty, 0, GATED, GROUP_M, HALVES, STAGES)),
            (_consume, (x_scale, w_scale, out, order, tiles, bound, N, K, TOPK, N_BLOCKS,
                        a1, b0, b1, full, more, empty, 1, GATED, GROUP_M, HALVES, STAGES)),
            (_produce, (x, w, tiles, bound, N, K, N_BLOCKS, a0, a1, b0, b1, full, more, empty,
                        GATED, GROUP_M, HALVES, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def multiply_hopper(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    order: SortedSlots,
    table: torch.Tensor | None,
    gated: bool,
    halves: int,
    stages: int,
    group_m: int = 16,
    programs: int | None = None,
) -> None:
    """out = x @ w.T of sorted rows x, E4M3 [S, K]; see ``grouped_gemm.multiply``."""
    tiles, bound = tile_table(order, table, BLOCK_M)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = TensorDescriptor.from_tensor(x, [64, 128], layout)
    weights: Any = TensorDescriptor.from_tensor(stack.data.view(-1, stack.K), [128, 128], layout)
    n_blocks = triton.cdiv(stack.N, 128 if gated else 128 * halves)
    count = programs or torch.cuda.get_device_properties(x.device).multi_processor_count
    gemm_fp8_hopper[(min(count, bound * n_blocks),)](
        rows, x_scale, weights, stack.scale, out, order.slots, tiles, bound, stack.N, stack.K,
        order.topk, n_blocks,
        GATED=gated, GROUP_M=group_m, HALVES=halves, STAGES=stages, num_warps=4,
    )  # fmt: skip
