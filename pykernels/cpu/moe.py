"""The two stages of a fused MoE call, as tasks (SOSP'25 section 3.2, "Fused MoE Operator").

``gate_up`` takes a run of 32-row blocks of one expert and writes ``h = silu(gate) * up`` as bf16.
``down`` takes a run of output blocks and one expert and adds its weighted outputs to the float32
sums; it must be called for every active expert in order, by one thread for a given run, which is
what
makes the result independent of the thread count. The first expert starts the sums at zero, the last
one writes ``y``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import carray, types

from . import tile_avx512, tile_generic
from .intrin.registers import stack_alloc
from .intrin.sync import as_pointer
from .jit import inlined, task
from .job import f32, i64, job_at
from .tile_avx512 import E4M3_TABLES
from .tile_generic import round_bf16

_TILES = {"avx512": tile_avx512, "generic": tile_generic}
_GROUP = 8  # tokens of one pass
_ROW_BYTES = 32 * 4  # one token's float32 outputs of a block


@dataclass(frozen=True)
class MoEKernel:
    """The compiled stages of one (format, backend).

    ``gate_up.address`` and ``down.address`` are ``jit.TASK`` pointers. Task indices:
    ``gate_up``: ``active_expert * i_chunks + chunk``; ``down``: ``chunk * A + active_expert``.
    ``tables`` goes into the descriptor; it lives as long as the module.
    """

    fmt: str
    backend: str
    gate_up: Any
    down: Any


def tables_address() -> int:
    """Address of the decoding tables that the tiles read."""
    return E4M3_TABLES.data_ptr()


@inlined
def _gather_rows(rows, base, stride, slots, first, count):
    """rows[i] = address of slot ``first + i``'s input, the last one repeated up to the group."""
    addresses = carray(as_pointer(rows), (_GROUP,), types.int64)
    for i in range(_GROUP):
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


@functools.cache
def make_kernel(backend: str, fmt: str) -> MoEKernel:
    """Compiles (or loads from the cache) the stages for a weight format.

    The caller has asked ``registry`` first: compiling for a CPU that lacks the instructions aborts.
    """
    module = _TILES[backend]
    tiles = module.make_tiles(fmt)
    silu_mul_row, weighted_add_row = module.silu_mul_row, module.weighted_add_row
    variant = f"{backend}-{fmt}"

    @task(f"gate-up-{variant}")
    def gate_up(job_address, index, worker):
        job = job_at(job_address)
        active = index // job.i_chunks
        first_block = (index % job.i_chunks) * job.i_chunk
        expert = i64(job.experts, active)
        w = job.gate_up + expert * job.gate_up_stride
        scale = job.gate_up_scale + expert * job.gate_up_scale_stride
        rows = stack_alloc(64)
        gate, up = stack_alloc(1024), stack_alloc(1024)  # float32 [8, 32] each
        first, last = i64(job.starts, active), i64(job.starts, active + 1)
        for block in range(first_block, min(first_block + job.i_chunk, job.i_blocks)):
            w_gate = w + 2 * block * job.gate_up_block
            w_up = w_gate + job.gate_up_block
            s_gate = scale + 2 * block * job.gate_up_k * 4
            s_up = s_gate + job.gate_up_k * 4
            for slot in range(first, last, _GROUP):
                M = min(_GROUP, last - slot)
                _gather_rows(rows, job.x, job.x_stride, job.slot_token, slot, M)
                tiles(M, w_gate, s_gate, job.gate_up_k, rows, job.tables, gate)
                tiles(M, w_up, s_up, job.gate_up_k, rows, job.tables, up)
                for t in range(M):
                    h = job.h + (slot + t) * job.h_stride + block * 64
                    silu_mul_row(gate + t * _ROW_BYTES, up + t * _ROW_BYTES, h)
        return 0

    @task(f"down-{variant}")
    def down(job_address, index, worker):
        job = job_at(job_address)
        active = index % job.A
        first_block = (index // job.A) * job.h_chunk
        last_block = min(first_block + job.h_chunk, job.h_blocks)
        expert = i64(job.experts, active)
        w = job.down + expert * job.down_stride
        scale = job.down_scale + expert * job.down_scale_stride
        rows = stack_alloc(64)
        out = stack_alloc(1024)  # float32 [8, 32]
        if active == 0:
            for t in range(job.T):
                at = job.acc + t * job.acc_stride
                sums = carray(as_pointer(at), (32 * last_block,), types.float32)
                sums[32 * first_block :] = types.float32(0)
        first, last = i64(job.starts, active), i64(job.starts, active + 1)
        for block in range(first_block, last_block):
            w_down = w + block * job.down_block
            s_down = scale + block * job.down_k * 4
            for slot in range(first, last, _GROUP):
                M = min(_GROUP, last - slot)
                _gather_rows(rows, job.h, job.h_stride, 0, slot, M)
                tiles(M, w_down, s_down, job.down_k, rows, job.tables, out)
                for t in range(M):
                    acc = job.acc + i64(job.slot_token, slot + t) * job.acc_stride + block * 128
                    weighted_add_row(f32(job.slot_weight, slot + t), out + t * _ROW_BYTES, acc)
        if active == job.A - 1:
            for t in range(job.T):
                for block in range(first_block, last_block):
                    _write_out(job, t, 32 * block)
        return 0

    return MoEKernel(fmt, backend, gate_up, down)
