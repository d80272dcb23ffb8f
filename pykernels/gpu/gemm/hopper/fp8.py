"""The grouped GEMM of E4M3 blocks for Hopper, warp-specialized.

The same function as ``gemm_fp8``, in Gluon. A producer warp asks the tensor memory accelerator
for tiles of 128 inputs; two warpgroups multiply 64 rows each with 256 outputs (gated: 128 of gate
and the same of up). They begin products by turns: while one scales its product and adds it in
float32, the other one's runs. Programs walk over tiles, so that the next tile's copies run beside
the last one's epilogue. A gated tile has a whole group of 128 outputs of a row, so it can quantize
them too.
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
def work_at(
    tiles, bound, t, blocks, whole, K, N_BLOCKS, GROUP_M: gl.constexpr, SPLIT: gl.constexpr
):
    """(expert, first row, row behind its last, N block, first group, groups) of work ``t``;
    zeros behind all. From tile ``whole`` on SPLIT neighbours share one: each has a part of K."""
    over = gl.maximum(t - whole, 0)
    tile = t - over + over // SPLIT
    expert, first, hi, n_block = tile_at(tiles, bound, tile, blocks, N_BLOCKS, GROUP_M)
    width = gl.cdiv(K, 128)
    groups = width
    g0 = 0
    if SPLIT > 1:
        share = gl.cdiv(width, SPLIT)
        g0 = gl.where(t < whole, 0, over % SPLIT * share)
        groups = gl.where(t < whole, groups, gl.minimum(share, width - g0))
    return expert, first, hi, n_block, g0, groups


@gluon.jit
def _works(tiles, whole, SPLIT: gl.constexpr):
    """How many pieces of work ``tiles`` tiles are."""
    if SPLIT > 1:
        tiles = whole + (tiles - whole) * SPLIT
    return tiles


@gluon.jit
def _produce(
    x, w, tiles, bound, whole, N, K, N_BLOCKS, a0, a1, b0, b1, full, more, empty,
    nexts, n_full, n_empty,
    GATED: gl.constexpr, GROUP_M: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    blocks = blocks_of(tiles, bound)
    works = _works(blocks * N_BLOCKS, whole, SPLIT)
    step = 0
    turn = 0
    t = gl.program_id(0)
    while t < works:
        expert, first, hi, n_block, g0, groups = work_at(
            tiles, bound, t, blocks, whole, K, N_BLOCKS, GROUP_M, SPLIT
        )
        if GATED:
            row = expert * 2 * N + n_block * 128
            other = row + N
        else:
            row = expert * N + n_block * 256
            other = row + 128
        for g in range(g0, g0 + groups):
            i = step % STAGES
            mbarrier.wait(empty.index(i), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), 2 * 128 * 128)
            tma_load(x, [first, g * 128], full.index(i), a0.index(i))
            tma_load(x, [first + 64, g * 128], full.index(i), a1.index(i))
            tma_load(w, [row, g * 128], full.index(i), b0.index(i))
            mbarrier.expect(more.index(i), 128 * 128)
            tma_load(w, [other, g * 128], more.index(i), b1.index(i))
            step += 1
        t = take_next(tiles, bound, t, nexts, n_full, n_empty, turn)
        turn += 1


@gluon.jit
def _store_plain(
    y, out, bias, parts, first, hi, n, over, N,
    PART: gl.constexpr, HALF: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Outputs 128 n .. of a tile, or a part of their sums: [works, 2 halves, 128 rows, 128]."""
    ACC: gl.constexpr = y.type.layout
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, ACC))
    if bias is not None:
        mask = n * 128 + col < N
        own = gl.load(bias + n * 128 + col, mask=mask, other=0.0).to(gl.float32)
        if SPLIT > 1:
            own = gl.where(over < 0, own, 0.0)
        y += own[None, :]
    if SPLIT > 1:
        row = 64 * PART + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
        whole = gl.maximum(over, 0).to(gl.int64) * 32768 + HALF * 16384
        at = parts + whole + row[:, None] * 128 + col[None, :]
        gl.store(at, y, mask=(row[:, None] + col[None, :] >= 0) & (over >= 0))
        hi = gl.where(over < 0, hi, 0)
    store_tile(to_bf16(y), out, first, hi, n * 128, N, WIDE)


@gluon.jit
def to_e4m3(x):
    """float32 -> uint8, as ``dequant.float_to_e4m3``: one instruction for two."""
    return x.to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.jit
def _store_quantized(y, codes, scales, first, hi, n_block, N, ACC: gl.constexpr):
    """``quantize_fp8`` of rows of a [64, 128] tile, which are one group each."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    col = n_block * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, ACC))
    y = gl.where((col < N)[None, :], to_bf16(y).to(gl.float32), 0.0)
    amax = gl.max(gl.abs(y), 1)
    scale = gl.where(amax > 0, gl.div_rn(amax, gl.zeros_like(amax) + 448.0), 1.0)
    code = to_e4m3(gl.div_rn(y, scale[:, None] + gl.zeros_like(y)))
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    gl.store(scales + row * gl.cdiv(N, 128) + n_block, scale, mask=row < hi)
    store_tile(code, codes, first, hi, n_block * 128, N, WIDE)


@gluon.jit
def _scales(
    x_scale, w_scale, expert, first, hi, n_block, g0, N, width, mask,
    GATED: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Where a tile's scales begin (rows, first weights, second weights), and the first of each."""
    row = gl.minimum(first + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)), hi - 1)
    count = gl.cdiv(N, 128)
    if GATED:
        line = expert * 2 * count + n_block
        other = line + count
    else:
        n = n_block * 2
        line = expert * count + n
        other = line + gl.where(n + 1 < count, 1, 0)
    at = x_scale + row * width + g0
    at0 = w_scale + line * width + g0
    at1 = w_scale + other * width + g0
    s = gl.load(at, mask=row >= 0, other=0.0)  # behind all tiles hi is 0
    return at, at0, at1, s, gl.load(at0, mask=mask, other=0.0), gl.load(at1, mask=mask, other=0.0)


@gluon.jit
def _consume(
    x_scale, w_scale, out, out_scale, bias, parts, tiles, bound, whole, N, K, N_BLOCKS,
    a, b0, b1, full, more, empty, nexts, n_full, n_empty, turns,
    PART: gl.constexpr, GATED: gl.constexpr, QUANTIZE: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = blocks_of(tiles, bound)
    works = _works(blocks * N_BLOCKS, whole, SPLIT)
    zeros = gl.full([64, 128], 0.0, gl.float32, layout=ACC)
    width = gl.cdiv(K, 128)
    t = gl.program_id(0)
    expert, first, hi, n_block, g0, groups = work_at(
        tiles, bound, t, blocks, whole, K, N_BLOCKS, GROUP_M, SPLIT
    )
    first += 64 * PART
    at, at0, at1, s, s0, s1 = _scales(
        x_scale, w_scale, expert, first, hi, n_block, g0, N, width, t < works, GATED, ACC
    )
    step = 0
    turn = 0
    while t < works:
        acc0 = zeros
        acc1 = zeros
        for g in range(groups):
            i = step % STAGES
            mbarrier.wait(full.index(i), (step // STAGES) & 1)
            mbarrier.wait(turns.index(PART), 1 - PART)
            p = warpgroup_mma(a.index(i), b0.index(i).permute((1, 0)), zeros, use_acc=False,
                              is_async=True)  # fmt: skip
            mbarrier.arrive(turns.index(1 - PART), count=1)
            # The next scales are loaded while the product runs.
            ahead = gl.minimum(g + 1, groups - 1)
            s_next = gl.load(at + ahead)
            s0_next = gl.load(at0 + ahead)
            s1_next = gl.load(at1 + ahead)
            p = warpgroup_mma_wait(0, deps=[p])
            acc0 += p * (s * s0)[:, None]
            acc0 = warpgroup_mma_wait(0, deps=[acc0])  # or LLVM adds behind the next product
            # Across this wait ptxas moves nothing: products share their registers.
            mbarrier.wait(more.index(i), (step // STAGES) & 1)
            mbarrier.wait(turns.index(PART), PART)
            p = warpgroup_mma(a.index(i), b1.index(i).permute((1, 0)), zeros, use_acc=False,
                              is_async=True)  # fmt: skip
            mbarrier.arrive(turns.index(1 - PART), count=1)
            p = warpgroup_mma_wait(0, deps=[p])
            mbarrier.arrive(empty.index(i), count=1)
            acc1 += p * (s * s1)[:, None]
            s = s_next
            s0 = s0_next
            s1 = s1_next
            step += 1
        done, upto, n, over = first, hi, n_block, t - whole
        # The next tile's table line, then its scales, come while this one's results go.
        t = next_taken(tiles, t, nexts, n_full, n_empty, turn)
        turn += 1
        expert, first, hi, n_block, g0, groups = work_at(
            tiles, bound, t, blocks, whole, K, N_BLOCKS, GROUP_M, SPLIT
        )
        first += 64 * PART
        if GATED:
            acc0 = acc0 / (1 + gl.exp(-acc0)) * acc1
        else:
            _store_plain(acc0, out, bias, parts, done, upto, n * 2, over, N, PART, 0, SPLIT)
        at, at0, at1, s, s0, s1 = _scales(
            x_scale, w_scale, expert, first, hi, n_block, g0, N, width, t < works, GATED, ACC
        )
        if QUANTIZE:
            _store_quantized(acc0, out, out_scale, done, upto, n, N, ACC)
        elif GATED:
            store_tile(to_bf16(acc0), out, done, upto, n * 128, N, WIDE)
        else:
            _store_plain(acc1, out, bias, parts, done, upto, n * 2 + 1, over, N, PART, 1, SPLIT)


@gluon.jit(do_not_specialize=["bound", "whole", "N_BLOCKS"])
def gemm_fp8_hopper(
    x, x_scale, w, w_scale, out, out_scale, bias, parts, tiles, bound, whole, N, K, N_BLOCKS,
    GATED: gl.constexpr, QUANTIZE: gl.constexpr, GROUP_M: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As ``gemm_fp8``; rows of x in the experts' order.

    Args:
        x: descriptor of blocks [64, 128] of E4M3 [S, K].
        x_scale: float32 [S, ceil(K / 128)].
        w: descriptor of blocks [128, 128] of E4M3 [matrices * N, K].
        out: bfloat16 [S, N]; with QUANTIZE uint8, the E4M3 codes of what that would have been.
        out_scale: with QUANTIZE float32 [S, ceil(N / 128)].
        bias: [N] or None; not gated.
        parts: with SPLIT > 1 float32 [works behind ``whole``, 2, 128, 128].
        tiles, bound: see ``tile_table``; None and rows: one matrix for all rows.
        whole: tiles that no programs share.
    """
    E4M3: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], E4M3)
    a1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], E4M3)
    b0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], E4M3)
    b1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], E4M3)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    more = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    nexts = gl.allocate_shared_memory(gl.int64, [2, 1], NUMBER)
    n_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    n_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(n_full.index(i), count=1)
        mbarrier.init(n_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(more.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_consume, (x_scale, w_scale, out, out_scale, bias, parts, tiles, bound, whole, N, K,
                        N_BLOCKS, a0, b0, b1, full, more, empty,
                        nexts, n_full, n_empty, turns,
                        0, GATED, QUANTIZE, GROUP_M, SPLIT, STAGES)),
            (_consume, (x_scale, w_scale, out, out_scale, bias, parts, tiles, bound, whole, N, K,
                        N_BLOCKS, a1, b0, b1, full, more, empty,
                        nexts, n_full, n_empty, turns,
                        1, GATED, QUANTIZE, GROUP_M, SPLIT, STAGES)),
            (_produce, (x, w, tiles, bound, whole, N, K, N_BLOCKS, a0, a1, b0, b1, full, more,
                        empty, nexts, n_full, n_empty, GATED, GROUP_M, SPLIT, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def multiply_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    order: SortedPairs,
    *,
    gated: bool,
    group_m: int,
    out_scale: torch.Tensor | None = None,
) -> None:
    """out = x @ w.T of sorted rows x; see ``gemm.grouped.multiply``.

    Args:
        x: E4M3 [S, K], at a multiple of 16 bytes, as are the weights.
        out_scale: float32 [S, ceil(N / 128)] of a gated product: out [S, N] is E4M3 then.
    """
    tiles, bound = tile_table(order, BLOCK_M)
    n_blocks = triton.cdiv(stack.N, 128 if gated else 256)
    target = out if out_scale is None else out.view(torch.uint8)
    launch(
        x, x_scale, stack, target, out_scale, None, None, tiles, bound, 0, n_blocks,
        num_ctas=min(num_sms(x.device), bound * n_blocks), gated=gated, group_m=group_m, split=1,
    )  # fmt: skip


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    parts: torch.Tensor | None,
    tiles: torch.Tensor | None,
    bound: int,
    whole: int,
    n_blocks: int,
    *,
    num_ctas: int,
    gated: bool,
    group_m: int,
    split: int,
) -> None:
    """See ``gemm_fp8_hopper``."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = TensorDescriptor.from_tensor(x, [64, 128], layout)
    weights: Any = TensorDescriptor.from_tensor(stack.data.view(-1, stack.K), [128, 128], layout)
    gemm_fp8_hopper[(num_ctas,)](
        rows, x_scale, weights, stack.scale, out, out_scale, bias, parts, tiles, bound, whole,
        stack.N, stack.K, n_blocks, GATED=gated, QUANTIZE=out_scale is not None, GROUP_M=group_m,
        SPLIT=split, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
