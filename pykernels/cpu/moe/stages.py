"""The stages of a fused MoE call, as tasks (SOSP'25 section 3.2, "Fused MoE Operator").

``rows`` copies the inputs of a run of tokens into rows (``inputs``), where the driver has not.
``pack`` moves the inputs of up to 64 slots of an expert into A tiles, for experts that take the
GEMM. ``gate_up`` takes a run of 32-row blocks of one expert, writes ``h = silu(gate) * up`` as bf16
and quantizes it (int8 codes or slices, sums) for ``down``. ``down`` takes a run of output blocks
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
from ..gemv.common import MAX_TOKENS as PASS
from ..gemv.common import point_at_rows
from ..intrin.registers import stack_alloc
from ..intrin.scalar import round_bf16
from ..intrin.sync import as_pointer, call_routine
from ..jit import inlined, task
from ..job import f32, i64, job_at
from ..raised import RAISED
from .epilogue import Epilogue
from .inputs import make_rows

_ROW_BYTES = 32 * 4  # one token's float32 outputs of a block, and its biases
PIECE = 64
"""Slots that one pack task moves into A tiles."""


@dataclass(frozen=True)
class Stages:
    """The compiled tasks (``jit.TASK``).

    Task indices: ``rows``: the run of tokens; ``pack``: the piece; ``gate_up``:
    ``active_expert * i_chunks + chunk``; ``down``: ``chunk * A + active_expert``.
    """

    rows: Any
    pack: Any
    gate_up: Any
    down: Any


@inlined
def _sums_at(job, block, t):
    """Address of the 32 sums of a block and a token. A run of blocks is one piece of memory: rows
    of H would be a few lines from each of many pages, in few of the cache's sets."""
    return job.acc + (block * job.T + t) * _ROW_BYTES


@inlined
def _write_out(job, t, n0):
    """Converts 32 finished sums of token t to the dtype of y, without the padding."""
    sums = carray(as_pointer(_sums_at(job, n0 // 32, t)), (32,), types.float32)
    stop = min(n0 + 32, job.H)
    if job.y_bf16 != 0:
        halves = carray(as_pointer(job.y + t * job.y_stride), (stop,), types.uint16)
        if stop == n0 + 32:  # in vectors, which LLVM makes of a known count alone
            for n in range(32):
                halves[n0 + n] = round_bf16(sums[n])
        else:
            for n in range(n0, stop):
                halves[n] = round_bf16(sums[n - n0])
    else:
        floats = carray(as_pointer(job.y + t * job.y_stride), (stop,), types.float32)
        for n in range(n0, stop):
            floats[n] = sums[n - n0]


@inlined
def _zero_padding(job, h_rows, h_stride, first, last):
    """Clears h between I and its padded end: a wider layer may have been there."""
    start, stop = 32 * job.i_blocks, K_BLOCK * job.down_k
    for slot in range(first, last):
        h = carray(as_pointer(h_rows + slot * h_stride), (stop,), types.uint16)
        for i in range(start, stop):
            h[i] = 0


@inlined
def _quantize_h(job, quantize_row, h_rows, h_stride, first, last, first_block, last_block):
    """Quantizes a run of blocks of some slots' h, the padding with the last one."""
    K = K_BLOCK * job.down_k
    stop = K if last_block == job.i_blocks else 32 * last_block
    if quantize_row != 0:
        for slot in range(first, last):
            row = h_rows + slot * h_stride
            if call_routine(quantize_row, (row, K, 32 * first_block, stop)) != 0:
                job.raised = RAISED


@functools.cache
def make_stages(epilogue: Epilogue) -> Stages:
    """Compiles the stages around an epilogue."""
    swiglu, weighted_add = epilogue.swiglu, epilogue.weighted_add
    OUT_AT = common.OUT_AT
    TOKENS, BLOCKS = common.MAX_TOKENS, common.MAX_BLOCKS
    ADDRESSES, OUTS = 8 * PASS, PASS * _ROW_BYTES

    @task(f"pack-{epilogue.name}")
    def pack(job_address, piece, worker):
        job = job_at(job_address)
        active, first = i64(job.piece_active, piece), i64(job.piece_slot, piece)
        start = i64(job.starts, active)
        last = min(first + PIECE, i64(job.starts, active + 1))
        tiles = job.x_tiles + i64(job.groups, active) * job.gate_up_k * job.tile_steps * common.TILE
        steps = job.tile_steps * job.gate_up_k
        for slot in range(first, last):
            row = job.x + i64(job.slot_token, slot) * job.x_stride
            K = K_BLOCK * job.gate_up_k
            copy_to_tile(
                row, K, tiles, slot - start, 0, steps, job.tile_steps, job.int8, job.interleave_x
            )
        return 0

    @inlined
    def multiply(job, tiles, M, w, then, scale, k_blocks, rows, out):
        """out[M, 32] = a packed block times up to PASS tokens; ``then``: what is read next."""
        K = K_BLOCK * k_blocks
        tile = (M, w, then, scale, 0, k_blocks, K, rows, job.tables, out)
        if call_routine(tiles, tile) != 0:
            job.raised = RAISED

    @inlined
    def gate_up_tiles(job, h_rows, h_stride, w, scale, bias, first, last, first_block, last_block):
        rows = stack_alloc(ADDRESSES)
        gates, ups = stack_alloc(OUTS), stack_alloc(OUTS)  # float32 [PASS, 32] each
        for block in range(first_block, last_block):
            for slot in range(first, last, PASS):
                M = min(PASS, last - slot)
                point_at_rows(rows, PASS, job.x, job.x_stride, job.slot_token, slot, M)
                for part in range(2):
                    at = w + (2 * block + part) * job.gate_up_block
                    scale_at = scale + (2 * block + part) * job.gate_up_scale_block
                    then = at if block + 1 == last_block and part else at + job.gate_up_block
                    out = ups if part else gates
                    tiles = job.gate_up_tiles
                    multiply(job, tiles, M, at, then, scale_at, job.gate_up_k, rows, out)
                bias_at = bias + 2 * block * _ROW_BYTES
                for t in range(M):
                    h = h_rows + (slot + t) * h_stride + block * 64
                    swiglu(gates + t * _ROW_BYTES, ups + t * _ROW_BYTES, bias_at, h)

    @inlined
    def gate_up_gemm(
        job, scratch, h_rows, h_stride, w, scale, bias, active, first, last, first_block, last_block
    ):
        rows = stack_alloc(2048)
        out = scratch + OUT_AT  # float32 [gate 0, up 0, gate 1, up 1, ...][Mp, 32]
        for slot in range(first, last, TOKENS):
            M = min(TOKENS, last - slot)
            Mp = common.padded_tokens(M)
            point_at_rows(rows, Mp, job.x, job.x_stride, job.slot_token, slot, M)
            group = i64(job.groups, active) + (slot - first) // 16
            x_tiles = job.x_tiles + group * job.gate_up_k * job.tile_steps * common.TILE
            for block in range(first_block, last_block, BLOCKS // 2):
                count = min(BLOCKS // 2, last_block - block)
                blocks = (
                    M, 2 * count, w + 2 * block * job.gate_up_block, job.gate_up_block,
                    scale + 2 * block * job.gate_up_scale_block, job.gate_up_scale_block,
                    job.gate_up_k, x_tiles, rows, job.tables, scratch,
                )  # fmt: skip
                if call_routine(job.gate_up_gemm, blocks) != 0:
                    job.raised = RAISED
                for b in range(count):
                    bias_at = bias + 2 * (block + b) * _ROW_BYTES
                    for t in range(M):
                        gate = out + (2 * b * Mp + t) * _ROW_BYTES
                        h = h_rows + (slot + t) * h_stride + (block + b) * 64
                        swiglu(gate, gate + Mp * _ROW_BYTES, bias_at, h)

    @inlined
    def pack_h(job, active, h_rows, h_stride, first, last, first_block, last_block):
        """Moves the blocks of h that a task has written, and the padding, into A tiles."""
        K = K_BLOCK * job.down_k
        per_step = K_BLOCK // job.tile_steps  # inputs: 32 bf16, or 64 int8
        stop = K if last_block == job.i_blocks else 32 * last_block
        tiles = job.h_tiles + i64(job.groups, active) * job.down_k * job.tile_steps * common.TILE
        for slot in range(first, last):
            row = h_rows + slot * h_stride
            copy_to_tile(
                row, K, tiles, slot - first, 32 * first_block // per_step, stop // per_step,
                job.tile_steps, job.int8, job.interleave_h,
            )  # fmt: skip

    @task(f"gate-up-{epilogue.name}")
    def gate_up(job_address, index, worker):
        job = job_at(job_address)
        active = index // job.i_chunks
        first_block = (index % job.i_chunks) * job.i_chunk
        last_block = min(first_block + job.i_chunk, job.i_blocks)
        expert = i64(job.experts, active)
        w = job.gate_up + expert * job.gate_up_stride
        scale = job.gate_up_scale + expert * job.gate_up_scale_stride
        bias = job.gate_up_bias + expert * job.gate_up_bias_stride
        first, last = i64(job.starts, active), i64(job.starts, active + 1)
        use_gemm = last - first >= job.gemm_from
        h_rows, h_stride = i64(job.h_rows, active), job.h_gemm_stride if use_gemm else job.h_stride
        if use_gemm:
            scratch = job.scratch + worker * job.scratch_stride
            gate_up_gemm(
                job, scratch, h_rows, h_stride, w, scale, bias, active, first, last, first_block,
                last_block,
            )  # fmt: skip
        else:
            gate_up_tiles(
                job, h_rows, h_stride, w, scale, bias, first, last, first_block, last_block
            )
        if last_block == job.i_blocks:
            _zero_padding(job, h_rows, h_stride, first, last)
        quantize_row = job.quantize_h_gemm if use_gemm else job.quantize_h
        _quantize_h(job, quantize_row, h_rows, h_stride, first, last, first_block, last_block)
        if use_gemm:
            pack_h(job, active, h_rows, h_stride, first, last, first_block, last_block)
        return job.raised

    @inlined
    def add_rows(job, slot, M, block, out, bias):
        """The sums of M slots' tokens += their weights x (out[M, 32] + the bias of the block)."""
        bias_at = bias + block * _ROW_BYTES
        for t in range(M):
            acc = _sums_at(job, block, i64(job.slot_token, slot + t))
            weighted_add(f32(job.slot_weight, slot + t), out + t * _ROW_BYTES, bias_at, acc)

    @inlined
    def down_tiles(
        job, h_rows, h_stride, w, then, scale, bias, first, last, first_block, last_block
    ):
        rows = stack_alloc(ADDRESSES)
        out = stack_alloc(OUTS)  # float32 [PASS, 32]
        for block in range(first_block, last_block):
            w_down = w + block * job.down_block
            s_down = scale + block * job.down_scale_block
            after = w_down + job.down_block if block + 1 < last_block else then
            for slot in range(first, last, PASS):
                M = min(PASS, last - slot)
                point_at_rows(rows, PASS, h_rows, h_stride, 0, slot, M)
                tiles = job.down_tiles
                multiply(job, tiles, M, w_down, after, s_down, job.down_k, rows, out)
                add_rows(job, slot, M, block, out, bias)

    @inlined
    def down_gemm(
        job, scratch, h_rows, h_stride, w, scale, bias, active, first, last, first_block, last_block
    ):
        rows = stack_alloc(2048)
        for slot in range(first, last, TOKENS):
            M = min(TOKENS, last - slot)
            Mp = common.padded_tokens(M)
            point_at_rows(rows, Mp, h_rows, h_stride, 0, slot, M)
            group = i64(job.groups, active) + (slot - first) // 16
            h_tiles = job.h_tiles + group * job.down_k * job.tile_steps * common.TILE
            for block in range(first_block, last_block, BLOCKS):
                count = min(BLOCKS, last_block - block)
                blocks = (
                    M, count, w + block * job.down_block, job.down_block,
                    scale + block * job.down_scale_block, job.down_scale_block, job.down_k,
                    h_tiles, rows, job.tables, scratch,
                )  # fmt: skip
                if call_routine(job.down_gemm, blocks) != 0:
                    job.raised = RAISED
                for b in range(count):
                    out = scratch + OUT_AT + b * Mp * _ROW_BYTES
                    add_rows(job, slot, M, block + b, out, bias)

    @task(f"down-{epilogue.name}")
    def down(job_address, index, worker):
        job = job_at(job_address)
        active = index % job.A
        first_block = i64(job.h_cuts, index // job.A)
        last_block = i64(job.h_cuts, index // job.A + 1)
        expert = i64(job.experts, active)
        w = job.down + expert * job.down_stride
        scale = job.down_scale + expert * job.down_scale_stride
        bias = job.down_bias + expert * job.down_bias_stride
        if active == 0:
            count = (last_block - first_block) * job.T * 32
            sums = carray(as_pointer(_sums_at(job, first_block, 0)), (count,), types.float32)
            for i in range(count):
                sums[i] = types.float32(0)
        first, last = i64(job.starts, active), i64(job.starts, active + 1)
        use_gemm = last - first >= job.gemm_from
        h_rows, h_stride = i64(job.h_rows, active), job.h_gemm_stride if use_gemm else job.h_stride
        if not use_gemm:
            # The same blocks of the next expert; behind the last one what is in cache already.
            then = expert if active + 1 == job.A else i64(job.experts, active + 1)
            then = job.down + then * job.down_stride + first_block * job.down_block
            down_tiles(
                job, h_rows, h_stride, w, then, scale, bias, first, last, first_block, last_block
            )
        else:
            scratch = job.scratch + worker * job.scratch_stride
            down_gemm(
                job, scratch, h_rows, h_stride, w, scale, bias, active, first, last, first_block,
                last_block,
            )  # fmt: skip
        if active == job.A - 1:
            for t in range(job.T):
                for block in range(first_block, last_block):
                    _write_out(job, t, 32 * block)
        return job.raised

    return Stages(make_rows(), pack, gate_up, down)
