"""Multiplying registers and doing nothing else: what the kernels' FLOP/s are measured against."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from .amx_state import request_permission
from .gemm_amx import write_config
from .intrin import amx
from .intrin.avx512 import add_f32, dot_bf16, store_f32, zero_f32
from .intrin.avx512_bytes import broadcast_u8
from .intrin.registers import f32x16_array, stack_alloc
from .intrin.sync import as_pointer
from .jit import task

_CHAINS = 16
ROUNDS = 20_000

FLOPS = {"avx512": ROUNDS * _CHAINS * 64, "amx": ROUNDS * 4 * 2 * 16 * 16 * 32}
"""Floating-point operations of one task, by instruction set."""


@functools.cache
def make_compute(isa: str) -> Any:
    """Compiles the task of ``FLOPS`` (``jit.TASK``; its job: the address of 64 bytes to write)."""
    if isa == "amx":
        request_permission()
        return _make_amx()
    return _make_avx512()


def _make_avx512() -> Any:
    @task("avx512")
    def compute(job, index, worker):
        sums = f32x16_array(_CHAINS)
        for i in range(_CHAINS):
            sums[i] = zero_f32()
        a, b = broadcast_u8(index), broadcast_u8(worker)
        for _ in range(ROUNDS):
            for i in range(_CHAINS):
                sums[i] = dot_bf16(sums[i], a, b)
        for i in range(1, _CHAINS):
            sums[0] = add_f32(sums[0], sums[i])
        store_f32(job, sums[0])
        return 0

    return compute


def _make_amx() -> Any:
    @task("amx")
    def compute(job, index, worker):
        zeros = stack_alloc(1024)
        carray(as_pointer(zeros), (256,), types.uint32)[:] = 0
        amx.load_config(write_config(stack_alloc(64), 16))
        amx.zero(0)
        amx.zero(1)
        amx.zero(2)
        amx.zero(3)
        amx.load(4, zeros, 64)
        amx.load(5, zeros, 64)
        amx.load(6, zeros, 64)
        amx.load(7, zeros, 64)
        for _ in range(ROUNDS):
            amx.dot_bf16(0, 4, 6)
            amx.dot_bf16(1, 4, 7)
            amx.dot_bf16(2, 5, 6)
            amx.dot_bf16(3, 5, 7)
        amx.store(0, zeros, 64)
        amx.release()
        return 0

    return compute
