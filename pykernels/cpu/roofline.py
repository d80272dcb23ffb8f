"""The two roofs that kernels are measured against, as tasks that do nothing else.

Compute: products of registers (``make_compute``), for FLOP/s. Memory: reading with plain loops
(``make_read``), for GB/s.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ..amx_state import request_permission
from ..registry import get_backend, load
from ..target import Target
from .gemm.amx import write_config
from .intrin import amx, avx2
from .intrin.avx512 import add_f32, broadcast_f32, dot_bf16, fma_f32, store_f32, zero_f32
from .intrin.avx512_bytes import add_i32, broadcast_u8, dot_u8i8, to_f32, zero_i32
from .intrin.descriptor import descriptor
from .intrin.prefetch import prefetch_l1, prefetch_l2
from .intrin.registers import (
    f32x8_array,
    f32x16_array,
    i32x8_array,
    i32x16_array,
    pin_i32,
    stack_alloc,
)
from .intrin.sync import as_pointer
from .jit import inlined, task

_CHAINS, _CHAINS_AVX2 = 16, 12
ROUNDS = 20_000

FLOPS = {
    "vfmadd231ps": ROUNDS * _CHAINS * 32,
    "vdpbf16ps": ROUNDS * _CHAINS * 64,
    "vpdpbusd": ROUNDS * _CHAINS * 128,
    "vfmadd231ps ymm": ROUNDS * _CHAINS_AVX2 * 16,
    "vpmaddubsw ymm": ROUNDS * _CHAINS_AVX2 * 64,
    "vpdpbusd ymm": ROUNDS * _CHAINS_AVX2 * 64,
    "tdpbf16ps": ROUNDS * 4 * 2 * 16 * 16 * 32,
    "tdpbssd": ROUNDS * 4 * 2 * 16 * 16 * 64,
}
"""Operations (a multiplication and an addition are two) of one task, by instruction; of 256 bits
("ymm"), ``vpmaddubsw`` with what makes integers of its words."""

NEEDS = {
    "vfmadd231ps": ("avx512f",),
    "vdpbf16ps": ("avx512f", "avx512bf16"),
    "vpdpbusd": ("avx512f", "avx512vnni"),
    "vfmadd231ps ymm": ("avx2", "fma"),
    "vpmaddubsw ymm": ("avx2",),
    "vpdpbusd ymm": ("avx2", "avxvnni"),
    "tdpbf16ps": ("amx-tile", "amx-bf16"),
    "tdpbssd": ("amx-tile", "amx-int8"),
}
"""CPU features."""


def instruction_of(backend: str, activations: str, target: Target) -> str | None:
    """What a backend multiplies many tokens with on ``target``; None for nothing of ``FLOPS``."""
    found = get_backend(backend).instruction
    return load(found)(activations, target) if found else None


@functools.cache
def make_compute(instruction: str) -> Any:
    """Compiles the task of ``FLOPS`` (``jit.TASK``; its args: the address of 64 bytes to write).

    The caller has seen that the CPU has what ``NEEDS`` says.
    """
    if instruction.startswith("t"):
        request_permission()
        return _make_amx(instruction)
    return _make_avx2(instruction) if "ymm" in instruction else _make_avx512(instruction)


def _make_avx512(instruction: str) -> Any:
    new, zero, add, as_f32, spread = f32x16_array, zero_f32, add_f32, _as_it_is, broadcast_u8
    if instruction == "vfmadd231ps":
        dot, spread = _fma, _normal_number
    elif instruction == "vdpbf16ps":
        dot = dot_bf16
    else:
        new, zero, dot, add, as_f32 = i32x16_array, zero_i32, dot_u8i8, add_i32, to_f32

    @task(instruction)
    def compute(args, index, worker):
        sums = new(_CHAINS)
        for i in range(_CHAINS):
            sums[i] = zero()
        a, b = spread(index), spread(worker)
        for _ in range(ROUNDS):
            for i in range(_CHAINS):
                sums[i] = dot(sums[i], a, b)
        for i in range(1, _CHAINS):
            sums[0] = add(sums[0], sums[i])
        store_f32(args, as_f32(sums[0]))
        return 0

    return compute


@inlined
def _as_it_is(value):
    return value


@inlined
def _fma(total, a, b):
    return fma_f32(a, b, total)


@inlined
def _normal_number(value):
    """Subnormal ones would be slow."""
    return broadcast_f32(types.float32(value + 1))


def _make_avx2(instruction: str) -> Any:
    if instruction == "vfmadd231ps ymm":
        return _make_avx2_fma(instruction)
    VNNI, N = instruction == "vpdpbusd ymm", _CHAINS_AVX2

    @task(instruction)
    def compute(args, index, worker):
        sums = i32x8_array(N)
        for i in range(N):
            sums[i] = avx2.zero_i32()
        a, b, one = avx2.broadcast_i32(index), avx2.broadcast_i32(worker), avx2.broadcast_i32(65537)
        for _ in range(ROUNDS):
            for i in range(N):
                b = pin_i32(b)  # else one product would do for all
                if VNNI:
                    sums[i] = avx2.dpbusd(sums[i], a, b)
                else:
                    sums[i] = avx2.add_i32(sums[i], avx2.dot_words(avx2.dot_u8i8(a, b), one))
        for i in range(1, N):
            sums[0] = avx2.add_i32(sums[0], sums[i])
        avx2.store_i32(args, sums[0])
        return 0

    return compute


def _make_avx2_fma(instruction: str) -> Any:
    N = _CHAINS_AVX2

    @task(instruction)
    def compute(args, index, worker):
        sums = f32x8_array(N)
        for i in range(N):
            sums[i] = avx2.zero_f32()
        a = avx2.broadcast_f32(types.float32(index + 1))
        b = avx2.broadcast_f32(types.float32(worker + 1))
        for _ in range(ROUNDS):
            for i in range(N):
                sums[i] = avx2.fma_f32(a, b, sums[i])
        for i in range(1, N):
            sums[0] = avx2.add_f32(sums[0], sums[i])
        avx2.store_f32(args, sums[0])
        return 0

    return compute


def _make_amx(instruction: str) -> Any:
    dot = amx.dot_bf16 if instruction == "tdpbf16ps" else amx.dot_i8

    @task(instruction)
    def compute(args, index, worker):
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
            dot(0, 4, 6)
            dot(1, 4, 7)
            dot(2, 5, 6)
            dot(3, 5, 7)
        amx.store(0, zeros, 64)
        amx.release()
        return 0

    return compute


STREAM, _stream_at = descriptor("stream", ("base", "bytes", "sink"))
"""The args of a read: task ``i`` reads ``bytes`` (a multiple of 1024) at ``base + i * bytes`` and
writes their sum as int64 words to element ``i`` at ``sink``."""

AHEAD = 4096
"""Bytes that a prefetching loop runs ahead of its loads: one page."""


@inlined
def _no_prefetch(address):
    pass


LOOPS = {
    "hardware": (_no_prefetch, 1),
    "l1": (prefetch_l1, 1),
    "l2": (prefetch_l2, 1),
    "hardware, two streams": (_no_prefetch, 2),
    "l1, two streams": (prefetch_l1, 2),
}
"""The plain read loops: what they prefetch with, and how many runs of a task's bytes they read side
by side. Which is fastest depends on the CPU."""


@functools.cache
def make_read(loop: str) -> Any:
    """Compiles the read task (``jit.TASK``) of one of ``LOOPS``."""
    prefetch, STREAMS = LOOPS[loop]

    @task(loop)
    def read(args_address, index, worker):
        args = _stream_at(args_address)
        base = args.base + index * args.bytes
        run = args.bytes // STREAMS
        total = types.int64(0)
        for at in range(0, run, 512):
            for stream in range(STREAMS):
                block = base + stream * run + at
                for line in range(8):
                    prefetch(block + 64 * line + AHEAD)
                words = carray(as_pointer(block), (64,), types.int64)
                for i in range(64):
                    total += words[i]
        carray(as_pointer(args.sink), (index + 1,), types.int64)[index] = total
        return 0

    return read
