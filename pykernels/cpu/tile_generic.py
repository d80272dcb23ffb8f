"""Portable tiles: the same blocks and the same sums in plain Numba, for any CPU.

float32 arithmetic throughout; LLVM vectorizes the loops over the 16 outputs of a pair-row with what
the CPU has (AVX2, NEON, SSE). Inputs and outputs are those of ``tile_avx512``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numba import carray, types

from ..quant import mxfp4
from ..quant.fp8 import decode_table
from ..quant.layout import K_BLOCK, K_STEP
from .decode import READERS
from .intrin.registers import stack_alloc
from .intrin.scalar import bits_from_f32, f32_from_bits
from .intrin.sync import as_pointer
from .jit import inlined, kernel
from .job import f32, i64

MAX_TOKENS = 8

_E4M3 = decode_table().numpy()
_INT4 = np.array([*range(8), *range(-8, 0)], np.float32)
_E2M1 = mxfp4.VALUES.numpy()
_PAIRS = 16  # pair-rows of a tile, and outputs of a pair-row


@inlined
def _floats(address, count):
    return carray(as_pointer(address), (count,), types.float32)


@inlined
def _words(address, count):
    return carray(as_pointer(address), (count,), types.uint32)


@inlined
def _even(word):
    """The low bf16 of a word as float32: a bf16 is the upper half of one."""
    return f32_from_bits(types.uint32(word << types.uint32(16)))


@inlined
def _odd(word):
    return f32_from_bits(types.uint32(word & types.uint32(0xFFFF0000)))


@inlined
def _row_bf16(w, step, half, r, even, odd):
    """Pair-row r of a step's half -> its 16 even-k and 16 odd-k weights as float32."""
    words = _words(w + (2 * step + half) * 1024 + r * 64, _PAIRS)
    for n in range(_PAIRS):
        even[n] = _even(words[n])
        odd[n] = _odd(words[n])


@inlined
def _row_fp8(w, step, half, r, even, odd):
    at = w + (2 * step + half) * 512 + (r // 2) * 64 + (r % 2) * 8
    codes = carray(as_pointer(at), (56,), types.uint8)
    for j in range(4):
        for n in range(4):
            even[4 * j + n] = _E4M3[codes[16 * j + 2 * n]]
            odd[4 * j + n] = _E4M3[codes[16 * j + 2 * n + 1]]


@inlined
def _row_int8(w, step, half, r, even, odd):
    at = w + (step // 2 * 2 + half) * 1024 + (step % 2 * 8 + r // 2) * 64 + r % 2 * 2
    fours = carray(as_pointer(at), (62,), types.int8)
    for n in range(_PAIRS):
        even[n] = types.float32(fours[4 * n])
        odd[n] = types.float32(fours[4 * n + 1])


@inlined
def _row_int4(w, step, half, r, even, odd):
    _row_nibbles(w, step, half, r, even, odd, _INT4)


@inlined
def _row_mxfp4(w, step, half, r, even, odd):
    _row_nibbles(w, step, half, r, even, odd, _E2M1)


@inlined
def _row_nibbles(w, step, half, r, even, odd, values):
    row = step % 2 * 8 + r // 2
    at = w + (step // 2 * 2 + half) * 512 + row // 2 * 64 + r % 2 * 2
    fours = carray(as_pointer(at), (62,), types.uint8)
    shift = types.uint8(4 * (row % 2))
    for n in range(_PAIRS):
        even[n] = values[(fours[4 * n] >> shift) & 15]
        odd[n] = values[(fours[4 * n + 1] >> shift) & 15]


_ROW = {
    "bf16": _row_bf16,
    "fp8": _row_fp8,
    "int8": _row_int8,
    "int4": _row_int4,
    "int4-g128": _row_int4,
    "mxfp4": _row_mxfp4,
}
"""format -> reader of a pair-row."""


def make_tiles(fmt: str) -> Callable:
    """Compiles ``tiles``: see ``tile_avx512.make_tiles``; ``ahead`` is not used."""
    read_row, reader = _ROW[fmt], READERS[fmt]
    BLOCK_BYTES = K_BLOCK // reader.k_step * 2 * reader.tile_bytes
    SCALED, SCALE_ROWS, SCALE_STEP = reader.scale_k > 0, reader.scale_rows, reader.scale_step_bytes
    GROUPS = K_BLOCK // reader.scale_k if SCALED else 1  # scale groups of 128 inputs
    STEPS = K_BLOCK // K_STEP // GROUPS

    @kernel(fmt)
    def tiles(M, w, scale, first, last, rows, tables, ahead, out):
        result = _floats(out, 32 * M)
        sums = _floats(stack_alloc(1024), 32 * M)  # [M, 32]
        even = _floats(stack_alloc(64), _PAIRS)
        odd = _floats(stack_alloc(64), _PAIRS)
        if first == 0:
            result[:] = types.float32(0)
        w += first * BLOCK_BYTES
        scale += first * GROUPS * SCALE_STEP
        for block in range(first, last):
            for group in range(GROUPS):
                sums[:] = types.float32(0)
                for step in range(group * STEPS, (group + 1) * STEPS):
                    for half in range(2):
                        for r in range(_PAIRS):
                            read_row(w, step, half, r, even, odd)
                            k = 2 * (block * K_BLOCK + step * K_STEP + 2 * r)  # bytes into a row
                            for t in range(M):
                                word = _words(i64(rows, t) + k, 1)[0]
                                x0, x1 = _even(word), _odd(word)
                                at = 32 * t + 16 * half
                                for n in range(_PAIRS):
                                    sums[at + n] += even[n] * x0 + odd[n] * x1
                for n in range(32):
                    factor = types.float32(1)
                    if SCALE_ROWS:
                        bits = carray(as_pointer(scale), (32,), types.uint16)[n]
                        factor = f32_from_bits(types.uint32(bits) << types.uint32(16))
                    elif SCALED:
                        factor = f32(scale, 0)
                    for t in range(M):
                        result[32 * t + n] += sums[32 * t + n] * factor
                scale += SCALE_STEP
            w += BLOCK_BYTES

    return tiles


@inlined
def round_bf16(value):
    """float32 -> bf16 bits, to nearest even; NaN stays NaN."""
    bits = bits_from_f32(value)
    if value != value:
        return types.uint16(0x7FC0)
    tie = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + tie) >> types.uint32(16))


@inlined
def silu_mul_row(gate, up, h):
    """h[0:32] = bf16(silu(gate[0:32]) * up[0:32])."""
    gates, ups = _floats(gate, 32), _floats(up, 32)
    out = carray(as_pointer(h), (32,), types.uint16)
    for n in range(32):
        g = gates[n]
        silu = g / (types.float32(1) + types.float32(math.exp(-g)))
        out[n] = round_bf16(types.float32(silu * ups[n]))


@inlined
def weighted_add_row(weight, value, acc):
    """acc[0:32] += weight * value[0:32]."""
    sums, values = _floats(acc, 32), _floats(value, 32)
    for n in range(32):
        sums[n] += weight * values[n]
