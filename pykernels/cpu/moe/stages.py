"""The stages of a fused MoE call, as tasks (SOSP'25 section 3.2, "Fused MoE Operator").

``pack`` moves the inputs of up to 64 pairs of an expert into A tiles, for experts that take the
GEMM. ``gate_up`` takes a run of 32-row blocks of one expert, writes ``h = silu(gate) * up`` as bf16
and quantizes it (int8 codes or slices, sums) for ``down``; of blocks that are quantized together,
the task that ends last does that. ``down`` takes a run of output blocks
and one expert and adds its weighted outputs to the float32 sums; it must be called for every active
expert in order for a given run, one after the other, which is what makes the result independent
of the thread count. The first expert starts the sums at zero, the last one writes ``y``.

An expert of few tokens runs tiles (one pass over its weights for up to 8 tokens), one of many the
GEMM, where there is one: the arithmetic-intensity switch of section 3.2. Both are called by
address: the stages know no format, and gate-up's may be another one than down's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import carray, types

from ...quant.layout import K_BLOCK
from ..gemm import common
from ..gemm.common import copy_to_tile
from ..gemv.common import MAX_TOKENS as MAX_M
from ..gemv.common import point_at_rows
from ..intrin.registers import stack_alloc
from ..intrin.sync import as_pointer, atomic_add, call_routine
from ..jit import inlined, task
from ..raised import RAISED
from ..words import f32, i64
from .args import moe_args_at
from .epilogue import Epilogue

_ROW_BYTES = 32 * 4  # one token's float32 outputs of a block, and its biases
PIECE = 64
"""Pairs that one pack task moves into A tiles."""


@dataclass(frozen=True)
class Stages:
    """The compiled tasks (``jit.TASK``).

    Task indices: ``pack``: the piece; ``gate_up``: ``active_expert * i_chunks + chunk``;
    ``down``: ``chunk * A + active_expert``.
    """

    pack: Any
    gate_up: Any
    down: Any


@inlined
def _sums_at(args, block, t):
    """Address of the 32 sums of a block and a token. A run of blocks is one piece of memory: rows
    of H would be a few lines from each of many pages, in few of the cache's sets."""
    return args.acc + (block * args.T + t) * _ROW_BYTES


@inlined
def _write_out(args, t, n0):
    """Copies 32 finished sums of token t to y, without the padding."""
    sums = carray(as_pointer(_sums_at(args, n0 // 32, t)), (32,), types.float32)
    stop = min(n0 + 32, args.H)
    floats = carray(as_pointer(args.y + t * args.y_stride), (stop,), types.float32)
    for n in range(n0, stop):
        floats[n] = sums[n - n0]


@inlined
def _zero_padding(args, h_rows, h_stride, first, last):
    """Clears h between I and its padded end: a wider layer may have been there."""
    start, stop = 32 * args.i_blocks, K_BLOCK * args.down_k
    for pair in range(first, last):
        h = carray(as_pointer(h_rows + pair * h_stride), (stop,), types.uint16)
        for i in range(start, stop):
            h[i] = 0


@inlined
def _quantize_h(args, quantize_row, h_rows, h_stride, first, last, first_block, last_block):
    """Quantizes a run of blocks of some pairs' h, the padding with the last one."""
    K = K_BLOCK * args.down_k
    stop = K if last_block == args.i_blocks else 32 * last_block
    if quantize_row != 0:
        for pair in range(first, last):
            row = h_rows + pair * h_stride
            if call_routine(quantize_row, (row, K, 32 * first_block, stop)) != 0:
                args.raised = RAISED


@functools.cache
def make_stages(epilogue: Epilogue) -> Stages:
    """Compiles the stages around an epilogue."""
    swiglu, weighted_add = epilogue.swiglu, epilogue.weighted_add
    OUT_AT = common.OUT_AT
    TOKENS, BLOCKS = common.MAX_TOKENS, common.MAX_BLOCKS
    ADDRESSES, OUTS = 8 * MAX_M, MAX_M * _ROW_BYTES

    @task(f"pack-{epilogue.name}")
    def pack(args_address, piece, worker):
        args = moe_args_at(args_address)
        active, first = i64(args.piece_active, piece), i64(args.piece_pair, piece)
        start = i64(args.starts, active)
        last = min(first + PIECE, i64(args.starts, active + 1))
        tiles = (
            args.x_tiles + i64(args.groups, active) * args.gate_up_k * args.tile_steps * common.TILE
        )
        steps = args.tile_steps * args.gate_up_k
        for pair in range(first, last):
            row = args.x + i64(args.pair_token, pair) * args.x_stride
            K = K_BLOCK * args.gate_up_k
            copy_to_tile(
                row, K, tiles, pair - start, 0, steps, args.tile_steps, args.int8, args.interleave_x
            )
        return 0

    @inlined
    def multiply(args, tiles, M, w, then, scale, k_blocks, rows, out):
        """out[M, 32] = a packed block times up to MAX_M tokens; ``then``: what is read next."""
        K = K_BLOCK * k_blocks
        tile = (M, w, then, scale, 0, k_blocks, K, rows, args.tables, out)
        if call_routine(tiles, tile) != 0:
            args.raised = RAISED

    @inlined
    def gate_up_tiles(args, h_rows, h_stride, w, scale, bias, first, last, first_block, last_block):
        rows = stack_alloc(ADDRESSES)
        gates, ups = stack_alloc(OUTS), stack_alloc(OUTS)  # float32 [MAX_M, 32] each
        for block in range(first_block, last_block):
            for pair in range(first, last, MAX_M):
                M = min(MAX_M, last - pair)
                point_at_rows(rows, MAX_M, args.x, args.x_stride, args.pair_token, pair, M)
                for part in range(2):
                    at = w + (2 * block + part) * args.gate_up_block
                    scale_at = scale + (2 * block + part) * args.gate_up_scale_block
                    then = at if block + 1 == last_block and part else at + args.gate_up_block
                    out = ups if part else gates
                    tiles = args.gate_up_tiles
                    multiply(args, tiles, M, at, then, scale_at, args.gate_up_k, rows, out)
                bias_at = bias + 2 * block * _ROW_BYTES
                for t in range(M):
                    h = h_rows + (pair + t) * h_stride + block * 64
                    swiglu(gates + t * _ROW_BYTES, ups + t * _ROW_BYTES, bias_at, h)

    @inlined
    def gate_up_gemm(
        args,
        scratch,
        h_rows,
        h_stride,
        w,
        scale,
        bias,
        active,
        first,
        last,
        first_block,
        last_block,
    ):
        rows = stack_alloc(2048)
        out = scratch + OUT_AT  # float32 [gate 0, up 0, gate 1, up 1, ...][Mp, 32]
        for pair in range(first, last, TOKENS):
            M = min(TOKENS, last - pair)
            Mp = common.padded_tokens(M)
            point_at_rows(rows, Mp, args.x, args.x_stride, args.pair_token, pair, M)
            group = i64(args.groups, active) + (pair - first) // 16
            x_tiles = args.x_tiles + group * args.gate_up_k * args.tile_steps * common.TILE
            for block in range(first_block, last_block, BLOCKS // 2):
                count = min(BLOCKS // 2, last_block - block)
                blocks = (
                    M,
                    2 * count,
                    w + 2 * block * args.gate_up_block,
                    args.gate_up_block,
                    scale + 2 * block * args.gate_up_scale_block,
                    args.gate_up_scale_block,
                    args.gate_up_k,
                    x_tiles,
                    rows,
                    args.tables,
                    scratch,
                )
                if call_routine(args.gate_up_gemm, blocks) != 0:
                    args.raised = RAISED
                for b in range(count):
                    bias_at = bias + 2 * (block + b) * _ROW_BYTES
                    for t in range(M):
                        gate = out + (2 * b * Mp + t) * _ROW_BYTES
                        h = h_rows + (pair + t) * h_stride + (block + b) * 64
                        swiglu(gate, gate + Mp * _ROW_BYTES, bias_at, h)

    @inlined
    def pack_h(args, active, h_rows, h_stride, first, last, first_block, last_block):
        """Moves the blocks of h that a task has written, and the padding, into A tiles."""
        K = K_BLOCK * args.down_k
        per_step = K_BLOCK // args.tile_steps  # inputs: 32 bf16, or 64 int8
        stop = K if last_block == args.i_blocks else 32 * last_block
        tiles = (
            args.h_tiles + i64(args.groups, active) * args.down_k * args.tile_steps * common.TILE
        )
        for pair in range(first, last):
            row = h_rows + pair * h_stride
            copy_to_tile(
                row,
                K,
                tiles,
                pair - first,
                32 * first_block // per_step,
                stop // per_step,
                args.tile_steps,
                args.int8,
                args.interleave_h,
            )

    @task(f"gate-up-{epilogue.name}")
    def gate_up(args_address, index, worker):
        args = moe_args_at(args_address)
        active = index // args.i_chunks
        first_block = (index % args.i_chunks) * args.i_chunk
        last_block = min(first_block + args.i_chunk, args.i_blocks)
        expert = i64(args.experts, active)
        w = args.gate_up + expert * args.gate_up_stride
        scale = args.gate_up_scale + expert * args.gate_up_scale_stride
        bias = args.gate_up_bias + expert * args.gate_up_bias_stride
        first, last = i64(args.starts, active), i64(args.starts, active + 1)
        use_gemm = last - first >= args.gemm_from
        h_rows, h_stride = (
            i64(args.h_rows, active),
            args.h_gemm_stride if use_gemm else args.h_stride,
        )
        if use_gemm:
            scratch = args.scratch + worker * args.scratch_stride
            gate_up_gemm(
                args,
                scratch,
                h_rows,
                h_stride,
                w,
                scale,
                bias,
                active,
                first,
                last,
                first_block,
                last_block,
            )
        else:
            gate_up_tiles(
                args, h_rows, h_stride, w, scale, bias, first, last, first_block, last_block
            )
        if last_block == args.i_blocks:
            _zero_padding(args, h_rows, h_stride, first, last)
        if args.h_done != 0:
            group, blocks = first_block // args.i_group, last_block - first_block
            groups = (args.i_blocks + args.i_group - 1) // args.i_group
            first_block = group * args.i_group
            last_block = min(first_block + args.i_group, args.i_blocks)
            done = atomic_add(args.h_done + 8 * (active * groups + group), blocks) + blocks
            if done < last_block - first_block:  # another task has the rest
                return args.raised
        quantize_row = args.quantize_h_gemm if use_gemm else args.quantize_h
        _quantize_h(args, quantize_row, h_rows, h_stride, first, last, first_block, last_block)
        if use_gemm:
            pack_h(args, active, h_rows, h_stride, first, last, first_block, last_block)
        return args.raised

    @inlined
    def add_rows(args, pair, M, block, out, bias):
        """The sums of M pairs' tokens += their weights x (out[M, 32] + the bias of the block)."""
        bias_at = bias + block * _ROW_BYTES
        for t in range(M):
            acc = _sums_at(args, block, i64(args.pair_token, pair + t))
            weighted_add(f32(args.pair_weight, pair + t), out + t * _ROW_BYTES, bias_at, acc)

    @inlined
    def down_tiles(
        args, h_rows, h_stride, w, then, scale, bias, first, last, first_block, last_block
    ):
        rows = stack_alloc(ADDRESSES)
        out = stack_alloc(OUTS)  # float32 [MAX_M, 32]
        for block in range(first_block, last_block):
            w_down = w + block * args.down_block
            s_down = scale + block * args.down_scale_block
            after = w_down + args.down_block if block + 1 < last_block else then
            for pair in range(first, last, MAX_M):
                M = min(MAX_M, last - pair)
                point_at_rows(rows, MAX_M, h_rows, h_stride, 0, pair, M)
                tiles = args.down_tiles
                multiply(args, tiles, M, w_down, after, s_down, args.down_k, rows, out)
                add_rows(args, pair, M, block, out, bias)

    @inlined
    def down_gemm(
        args,
        scratch,
        h_rows,
        h_stride,
        w,
        scale,
        bias,
        active,
        first,
        last,
        first_block,
        last_block,
    ):
        rows = stack_alloc(2048)
        for pair in range(first, last, TOKENS):
            M = min(TOKENS, last - pair)
            Mp = common.padded_tokens(M)
            point_at_rows(rows, Mp, h_rows, h_stride, 0, pair, M)
            group = i64(args.groups, active) + (pair - first) // 16
            h_tiles = args.h_tiles + group * args.down_k * args.tile_steps * common.TILE
            for block in range(first_block, last_block, BLOCKS):
                count = min(BLOCKS, last_block - block)
                blocks = (
                    M,
                    count,
                    w + block * args.down_block,
                    args.down_block,
                    scale + block * args.down_scale_block,
                    args.down_scale_block,
                    args.down_k,
                    h_tiles,
                    rows,
                    args.tables,
                    scratch,
                )
                if call_routine(args.down_gemm, blocks) != 0:
                    args.raised = RAISED
                for b in range(count):
                    out = scratch + OUT_AT + b * Mp * _ROW_BYTES
                    add_rows(args, pair, M, block + b, out, bias)

    @task(f"down-{epilogue.name}")
    def down(args_address, index, worker):
        args = moe_args_at(args_address)
        active = index % args.A
        first_block = i64(args.h_cuts, index // args.A)
        last_block = i64(args.h_cuts, index // args.A + 1)
        expert = i64(args.experts, active)
        w = args.down + expert * args.down_stride
        scale = args.down_scale + expert * args.down_scale_stride
        bias = args.down_bias + expert * args.down_bias_stride
        if active == 0:
            count = (last_block - first_block) * args.T * 32
            sums = carray(as_pointer(_sums_at(args, first_block, 0)), (count,), types.float32)
            for i in range(count):
                sums[i] = types.float32(0)
        first, last = i64(args.starts, active), i64(args.starts, active + 1)
        use_gemm = last - first >= args.gemm_from
        h_rows, h_stride = (
            i64(args.h_rows, active),
            args.h_gemm_stride if use_gemm else args.h_stride,
        )
        if not use_gemm:
            # The same blocks of the next expert; behind the last one what is in cache already.
            then = expert if active + 1 == args.A else i64(args.experts, active + 1)
            then = args.down + then * args.down_stride + first_block * args.down_block
            down_tiles(
                args, h_rows, h_stride, w, then, scale, bias, first, last, first_block, last_block
            )
        else:
            scratch = args.scratch + worker * args.scratch_stride
            down_gemm(
                args,
                scratch,
                h_rows,
                h_stride,
                w,
                scale,
                bias,
                active,
                first,
                last,
                first_block,
                last_block,
            )
        if active == args.A - 1:
            for t in range(args.T):
                for block in range(first_block, last_block):
                    _write_out(args, t, 32 * block)
        return args.raised

    return Stages(pack, gate_up, down)
