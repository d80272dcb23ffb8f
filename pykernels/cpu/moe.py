"""The stages of a fused MoE call, as tasks (SOSP'25 section 3.2, "Fused MoE Operator").

``pack`` moves the inputs of up to 64 slots of an expert into A tiles, for experts that take the
GEMM.
``gate_up`` takes a run of 32-row blocks of one expert and writes ``h = silu(gate) * up`` as bf16.
``down`` takes a run of output blocks and one expert and adds its weighted outputs to the float32
sums; it must be called for every active expert in order, by one thread for a given run, which is
what makes the result independent of the thread count. The first expert starts the sums at zero, the
last one writes ``y``.

An expert of few tokens runs tiles (one pass over its weights for up to 8 tokens), one of many the
GEMM, where the backend has one: the arithmetic-intensity switch of section 3.2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import carray, types

from ..quant import FORMATS
from ..quant.layout import K_BLOCK
from . import gemm_amx, tile_avx512, tile_generic
from .amx_state import request_permission
from .decode import AHEAD, TABLES
from .intrin import amx
from .intrin.registers import stack_alloc
from .intrin.sync import as_pointer
from .jit import inlined, task
from .job import f32, i64, job_at
from .tile_generic import round_bf16

_TILES = {"amx": tile_avx512, "avx512": tile_avx512, "generic": tile_generic}
_GROUP = 8  # tokens of one tile
_SWEEP = 64  # tokens that share a pass over the weights, slab by slab
_SLAB = 2  # input blocks of 128 in a slab: its weights and the next one's stay in L1 meanwhile
_ROW_BYTES = 32 * 4  # one token's float32 outputs of a block
_GROUP_BYTES = 4 * gemm_amx.TILE  # A tiles of 16 slots by 128 inputs
PIECE = 64
"""Slots that one pack task moves into A tiles."""

NEVER = 1 << 62
"""``gemm_from`` of a backend without a GEMM."""


@dataclass(frozen=True)
class MoEKernel:
    """The compiled stages of one (format, backend).

    ``.address`` of each stage is a ``jit.TASK`` pointer. Task indices: ``pack``: the piece;
    ``gate_up``: ``active_expert * i_chunks + chunk``; ``down``: ``chunk * A + active_expert``.
    """

    fmt: str
    backend: str
    pack: Any
    gate_up: Any
    down: Any
    scratch_bytes: int

    @property
    def has_gemm(self) -> bool:
        return self.scratch_bytes > 0


def tables_address() -> int:
    """Address of the decoding tables that the tiles read."""
    return TABLES.data_ptr()


@inlined
def _point_at_rows(rows, room, base, stride, slots, first, count):
    """rows[i] = address of slot ``first + i``'s input, the last one repeated up to ``room``."""
    addresses = carray(as_pointer(rows), (room,), types.int64)
    for i in range(room):
        slot = first + min(i, count - 1)
        row = i64(slots, slot) if slots != 0 else slot
        addresses[i] = base + row * stride


@inlined
def _write_out(job, t, n0):
    """Converts 32 finished sums of token t to the dtype of y, without the padding."""
    sums = carray(as_pointer(job.acc + t * job.acc_stride), (n0 + 32,), types.float32)
    stop = min(n0 + 32, job.H)
    if job.y_bf16 != 0:
        halves = carray(as_pointer(job.y + t * job.y_stride), (stop,), types.uint16)
        for n in range(n0, stop):
            halves[n] = round_bf16(sums[n])
    else:
        floats = carray(as_pointer(job.y + t * job.y_stride), (stop,), types.float32)
        for n in range(n0, stop):
            floats[n] = sums[n]


@inlined
def _zero_padding(job, first, last):
    """Clears h between I and the next multiple of 128: a wider layer may have been there."""
    start, stop = 32 * job.i_blocks, K_BLOCK * job.down_k
    for slot in range(first, last):
        h = carray(as_pointer(job.h + slot * job.h_stride), (stop,), types.uint16)
        h[start:] = 0


@inlined
def _tile_row(tiles, k_groups, slot, step):
    """Address of a slot's inputs 32 * step, ... (64 bytes) in A tiles of k_groups * 128 inputs."""
    return tiles + (slot // 16 * 4 * k_groups + step) * gemm_amx.TILE + slot % 16 * 64


@inlined
def _no_gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, tables, scratch):
    """Stands where a backend has no GEMM; ``gemm_from`` is NEVER there."""


@functools.cache
def make_kernel(backend: str, fmt: str) -> MoEKernel:
    """Compiles (or loads from the cache) the stages for a weight format.

    The caller has asked ``registry`` first: compiling for a CPU that lacks the instructions aborts.
    """
    if backend == "amx":
        request_permission()
        return build_kernel(backend, fmt, amx)
    return build_kernel(backend, fmt)


def build_kernel(backend: str, fmt: str, amx_unit: Any = None) -> MoEKernel:
    """The stages from a backend's tiles and, on ``amx_unit``, the GEMM.

    Args:
        amx_unit: ``intrin.amx``, ``intrin.amx_model`` where there is none, or None for no GEMM.
    """
    module = _TILES[backend]
    tiles = module.make_tiles(fmt)
    SLAB_BYTES = _SLAB * FORMATS[fmt].block_bytes(K_BLOCK)
    silu_mul_row, weighted_add_row = module.silu_mul_row, module.weighted_add_row
    gemm = gemm_amx.make_gemm(fmt, amx_unit) if amx_unit else _no_gemm
    OUT_AT = gemm_amx.OUT_AT
    TOKENS, BLOCKS = gemm_amx.MAX_TOKENS, gemm_amx.MAX_BLOCKS
    variant = f"{backend}-{fmt}-{amx_unit.__name__ if amx_unit else 'no-gemm'}"

    @task(f"pack-{variant}")
    def pack(job_address, piece, worker):
        job = job_at(job_address)
        active, first = i64(job.piece_active, piece), i64(job.piece_slot, piece)
        start = i64(job.starts, active)
        last = min(first + PIECE, i64(job.starts, active + 1))
        tiles_of = job.x_tiles + i64(job.groups, active) * job.gate_up_k * _GROUP_BYTES
        for slot in range(first, last):
            row = job.x + i64(job.slot_token, slot) * job.x_stride
            for step in range(4 * job.gate_up_k):
                to = _tile_row(tiles_of, job.gate_up_k, slot - start, step)
                carray(as_pointer(to), (8,), types.int64)[:] = carray(
                    as_pointer(row + 64 * step), (8,), types.int64
                )
        return 0

    @inlined
    def sweep(M, w, scale, k_blocks, rows, tables, out):
        """out[M, 32] = a packed block times up to _SWEEP tokens."""
        if M <= _GROUP:
            tiles(M, w, scale, 0, k_blocks, rows, tables, AHEAD, out)
        else:
            for slab in range(0, k_blocks, _SLAB):
                stop = min(slab + _SLAB, k_blocks)
                for t in range(0, M, _GROUP):
                    at, to = rows + 8 * t, out + t * _ROW_BYTES
                    tiles(min(_GROUP, M - t), w, scale, slab, stop, at, tables, SLAB_BYTES, to)

    @inlined
    def gate_up_tiles(job, w, scale, first, last, first_block, last_block):
        rows = stack_alloc(512)
        gate, up = stack_alloc(8192), stack_alloc(8192)  # float32 [64, 32] each
        for block in range(first_block, last_block):
            w_gate = w + 2 * block * job.gate_up_block
            w_up = w_gate + job.gate_up_block
            s_gate = scale + 2 * block * job.gate_up_scale_block
            s_up = s_gate + job.gate_up_scale_block
            for slot in range(first, last, _SWEEP):
                M = min(_SWEEP, last - slot)
                _point_at_rows(rows, (M + 7) // 8 * 8, job.x, job.x_stride, job.slot_token, slot, M)
                sweep(M, w_gate, s_gate, job.gate_up_k, rows, job.tables, gate)
                sweep(M, w_up, s_up, job.gate_up_k, rows, job.tables, up)
                for t in range(M):
                    h = job.h + (slot + t) * job.h_stride + block * 64
                    silu_mul_row(gate + t * _ROW_BYTES, up + t * _ROW_BYTES, h)

    @inlined
    def gate_up_gemm(job, scratch, w, scale, active, first, last, first_block, last_block):
        out = scratch + OUT_AT  # float32 [gate 0, up 0, gate 1, up 1, ...][Mp, 32]
        for slot in range(first, last, TOKENS):
            M = min(TOKENS, last - slot)
            Mp_bytes = gemm_amx.padded_tokens(M) * _ROW_BYTES
            group = i64(job.groups, active) + (slot - first) // 16
            x_tiles = job.x_tiles + group * job.gate_up_k * _GROUP_BYTES
            h_tiles = job.h_tiles + group * job.down_k * _GROUP_BYTES
            for block in range(first_block, last_block, BLOCKS // 2):
                count = min(BLOCKS // 2, last_block - block)
                gemm(
                    M, 2 * count, w + 2 * block * job.gate_up_block, job.gate_up_block,
                    scale + 2 * block * job.gate_up_scale_block, job.gate_up_scale_block,
                    job.gate_up_k,
                    x_tiles, job.tables, scratch,
                )  # fmt: skip
                for b in range(count):
                    for t in range(M):
                        gate = out + 2 * b * Mp_bytes + t * _ROW_BYTES
                        h = _tile_row(h_tiles, job.down_k, t, block + b)
                        silu_mul_row(gate, gate + Mp_bytes, h)
            if last_block == job.i_blocks:
                for t in range(M):
                    for step in range(job.i_blocks, 4 * job.down_k):
                        h = _tile_row(h_tiles, job.down_k, t, step)
                        carray(as_pointer(h), (32,), types.uint16)[:] = 0

    @task(f"gate-up-{variant}")
    def gate_up(job_address, index, worker):
        job = job_at(job_address)
        active = index // job.i_chunks
        first_block = (index % job.i_chunks) * job.i_chunk
        last_block = min(first_block + job.i_chunk, job.i_blocks)
        expert = i64(job.experts, active)
        w = job.gate_up + expert * job.gate_up_stride
        scale = job.gate_up_scale + expert * job.gate_up_scale_stride
        first, last = i64(job.starts, active), i64(job.starts, active + 1)
        if last - first < job.gemm_from:
            gate_up_tiles(job, w, scale, first, last, first_block, last_block)
            if last_block == job.i_blocks:
                _zero_padding(job, first, last)
        else:
            scratch = job.scratch + worker * job.scratch_stride
            gate_up_gemm(job, scratch, w, scale, active, first, last, first_block, last_block)
        return 0

    @inlined
    def add_rows(job, slot, M, block, out):
        """The sums of M slots' tokens += their weights x out[M, 32]."""
        for t in range(M):
            acc = job.acc + i64(job.slot_token, slot + t) * job.acc_stride + block * _ROW_BYTES
            weighted_add_row(f32(job.slot_weight, slot + t), out + t * _ROW_BYTES, acc)

    @inlined
    def down_tiles(job, w, scale, first, last, first_block, last_block):
        rows = stack_alloc(512)
        out = stack_alloc(8192)  # float32 [64, 32]
        for block in range(first_block, last_block):
            w_down = w + block * job.down_block
            s_down = scale + block * job.down_scale_block
            for slot in range(first, last, _SWEEP):
                M = min(_SWEEP, last - slot)
                _point_at_rows(rows, (M + 7) // 8 * 8, job.h, job.h_stride, 0, slot, M)
                sweep(M, w_down, s_down, job.down_k, rows, job.tables, out)
                add_rows(job, slot, M, block, out)

    @inlined
    def down_gemm(job, scratch, w, scale, active, first, last, first_block, last_block):
        for slot in range(first, last, TOKENS):
            M = min(TOKENS, last - slot)
            Mp_bytes = gemm_amx.padded_tokens(M) * _ROW_BYTES
            group = i64(job.groups, active) + (slot - first) // 16
            h_tiles = job.h_tiles + group * job.down_k * _GROUP_BYTES
            for block in range(first_block, last_block, BLOCKS):
                count = min(BLOCKS, last_block - block)
                gemm(
                    M, count, w + block * job.down_block, job.down_block,
                    scale + block * job.down_scale_block, job.down_scale_block, job.down_k,
                    h_tiles, job.tables, scratch,
                )  # fmt: skip
                for b in range(count):
                    add_rows(job, slot, M, block + b, scratch + OUT_AT + b * Mp_bytes)

    @task(f"down-{variant}")
    def down(job_address, index, worker):
        job = job_at(job_address)
        active = index % job.A
        first_block = (index // job.A) * job.h_chunk
        last_block = min(first_block + job.h_chunk, job.h_blocks)
        expert = i64(job.experts, active)
        w = job.down + expert * job.down_stride
        scale = job.down_scale + expert * job.down_scale_stride
        if active == 0:
            for t in range(job.T):
                at = job.acc + t * job.acc_stride
                sums = carray(as_pointer(at), (32 * last_block,), types.float32)
                sums[32 * first_block :] = types.float32(0)
        first, last = i64(job.starts, active), i64(job.starts, active + 1)
        if last - first < job.gemm_from:
            down_tiles(job, w, scale, first, last, first_block, last_block)
        else:
            scratch = job.scratch + worker * job.scratch_stride
            down_gemm(job, scratch, w, scale, active, first, last, first_block, last_block)
        if active == job.A - 1:
            for t in range(job.T):
                for block in range(first_block, last_block):
                    _write_out(job, t, 32 * block)
        return 0

    scratch_bytes = gemm_amx.SCRATCH_BYTES if amx_unit else 0
    return MoEKernel(fmt, backend, pack, gate_up, down, scratch_bytes)
