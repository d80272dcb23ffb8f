"""Portable tiles: the same blocks and the same sums in plain Numba, for any CPU.

float32 arithmetic throughout; LLVM vectorizes the loops over the 16 outputs of a pair-row with what
the CPU has (AVX2, NEON, SSE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types

from ...quant import mxfp4
from ...quant.fp8 import e4m3_values
from ...quant.gguf import iq1, iq2, iq3, iq4_nl
from ...quant.layout import K_BLOCK, K_STEP
from ..activations.row_layout import activation_scale, codes_at, group_sum, row_format
from ..intrin.registers import stack_alloc
from ..intrin.scalar import bf16_as_f32, f32_from_bits
from ..intrin.sync import as_pointer
from ..jit import inlined, routine
from ..weights.layout import (
    GROUP_HALVES,
    GROUP_ZERO,
    SCALE_K,
    SUPER_NVFP4,
    SUPERBLOCKS,
    TERNARY,
    Superblock,
    packed_bytes,
)
from ..words import f32, i64
from .common import ARGUMENTS

_E4M3 = e4m3_values().numpy()
_HALF_BIAS = np.float32(2.0**112)
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
    """Pair-row r of a step's half -> its 16 even-k and 16 odd-k weights, scales aside."""
    words = _words(w + (2 * step + half) * 1024 + r * 64, _PAIRS)
    for n in range(_PAIRS):
        even[n] = _even(words[n])
        odd[n] = _odd(words[n])


@inlined
def _half_of(bits):
    """An IEEE half as float32. (LLVM's own conversion needs F16C, or aborts the process.)"""
    magnitude = types.uint32((bits & types.uint32(0x7FFF)) << types.uint32(13))
    value = f32_from_bits(magnitude) * _HALF_BIAS  # exact, subnormals too
    if bits & types.uint32(0x7C00) == types.uint32(0x7C00):  # infinity and NaN
        value = f32_from_bits(types.uint32(magnitude | types.uint32(0x7F800000)))
    return -value if bits & types.uint32(0x8000) else value


@inlined
def _row_f16(w, step, half, r, even, odd):
    words = _words(w + (2 * step + half) * 1024 + r * 64, _PAIRS)
    for n in range(_PAIRS):
        even[n] = _half_of(words[n])
        odd[n] = _half_of(types.uint32(words[n] >> types.uint32(16)))


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


def _row_nibbles(values: np.ndarray, planes: int = 0, bits: int = 4) -> Callable:
    """Reader of codes of 4 or 2 ``bits`` with ``planes`` more: float32 ``values`` of each code."""
    CODES, EACH, MASK = 128 * bits, 8 // bits, (1 << bits) - 1
    TILE = CODES + 128 * planes

    @inlined
    def row_nibbles(w, step, half, r, even, odd):
        row, pair = step % 2 * 8 + r // 2, r % 2 * 2
        tile = w + (step // 2 * 2 + half) * TILE
        fours = carray(as_pointer(tile + row // EACH * 64 + pair), (62,), types.uint8)
        shift = types.uint8(bits * (row % EACH))
        for n in range(_PAIRS):
            low, high = (fours[4 * n] >> shift) & MASK, (fours[4 * n + 1] >> shift) & MASK
            for plane in range(planes):
                at = tile + CODES + (row * planes + plane) * 8 + n // 2
                both = carray(as_pointer(at), (1,), types.uint8)[0] >> (4 * (n % 2) + pair)
                low |= (both & 1) << (bits + plane)
                high |= (both >> 1 & 1) << (bits + plane)
            even[n] = values[low]
            odd[n] = values[high]

    return row_nibbles


_SIGNED = _row_nibbles(np.array([*range(8), *range(-8, 0)], np.float32))
_UNSIGNED = _row_nibbles(np.arange(16, dtype=np.float32))
_FIVE_BITS = _row_nibbles(np.arange(32, dtype=np.float32), planes=1)

_ROW = {
    "bf16": _row_bf16,
    "f16": _row_f16,
    "fp8": _row_fp8,
    "fp8-channel": _row_fp8,
    "int8": _row_int8,
    "int8-channel": _row_int8,
    **dict.fromkeys(("int4", "int4-g128", "int4-channel", "q4_0"), _SIGNED),
    **dict.fromkeys(("int4-zp", "int4-zp-g128", "q4_k", "q4_1"), _UNSIGNED),
    "mxfp4": _row_nibbles(mxfp4.VALUES.numpy()),
    "nvfp4": _row_nibbles(mxfp4.VALUES.numpy()),
    **dict.fromkeys(("iq4_nl", "iq4_xs"), _row_nibbles(iq4_nl.VALUES.numpy())),
    "iq3_s": _row_nibbles(iq3.IQ3_S_VALUES.numpy()),
    "iq3_xxs": _row_nibbles(iq3.IQ3_XXS_VALUES.numpy()),
    **dict.fromkeys(
        ("iq2_s", "iq2_xs", "iq2_xxs"), _row_nibbles(iq2.VALUES.numpy(), planes=1, bits=2)
    ),
    **dict.fromkeys(("q5_k", "q5_1"), _FIVE_BITS),
    "q5_0": _row_nibbles(np.arange(-16, 16, dtype=np.float32), planes=1),
    "q6_k": _row_nibbles(np.arange(-32, 32, dtype=np.float32), planes=2),
    "q3_k": _row_nibbles(np.arange(-4, 4, dtype=np.float32), planes=1, bits=2),
    **dict.fromkeys(("q2_k", "iq1_s"), _row_nibbles(np.arange(4, dtype=np.float32), bits=2)),
    **dict.fromkeys(TERNARY, _row_nibbles(np.arange(-1, 3, dtype=np.float32), bits=2)),
    "iq1_m": _row_nibbles(iq1.VALUES.numpy(), planes=1, bits=2),
    "q8_0": _row_int8,
}
"""format -> reader of a pair-row."""


@inlined
def _half(address, index):
    """The ``index``-th IEEE half."""
    return _half_of(types.uint32(carray(as_pointer(address), (index + 1,), types.uint16)[index]))


@inlined
def _u8(address, index):
    return types.float32(carray(as_pointer(address), (index + 1,), types.uint8)[index])


@inlined
def _no_factor(scale, group, n):
    return types.float32(1)


@inlined
def _for_block(scale, group, n):
    return f32(scale, group)


@inlined
def _for_outputs(scale, group, n):
    return f32(scale, n)


@inlined
def _bf16_groups(scale, group, n):
    return bf16_as_f32(carray(as_pointer(scale + 64 * group), (32,), types.uint16)[n])


@inlined
def _f16_groups(scale, group, n):
    return _half(scale + 64 * group, n)


@inlined
def _halves_factor(scale, group, n):
    return _half(scale + GROUP_HALVES * group, n)


@inlined
def _halves_minimum(scale, group, n):
    return _half(scale + GROUP_HALVES * group + 64, n)


@inlined
def _zero_factor(scale, group, n):
    return _half(scale + GROUP_ZERO * group, n)


@inlined
def _zero_minimum(scale, group, n):
    at = scale + GROUP_ZERO * group
    return _half(at, n) * _u8(at + 64, n)


@inlined
def _i8(address, index):
    return types.float32(carray(as_pointer(address), (index + 1,), types.int8)[index])


@inlined
def _low_nibble(address, index):
    return types.float32(carray(as_pointer(address), (index + 1,), types.uint8)[index] & 15)


@inlined
def _high_nibble(address, index):
    return types.float32(carray(as_pointer(address), (index + 1,), types.uint8)[index] >> 4)


@inlined
def _nvfp4(scale, group, n):
    at = scale + (group >> 4) * SUPER_NVFP4
    codes = carray(as_pointer(at + 128 + 32 * (group & 15)), (32,), types.uint8)
    return f32(at, n) * _E4M3[codes[n]]


def _superblock(of: Superblock) -> tuple[Callable, Callable]:
    """A group's factor and minimum."""
    SHIFT, MASK, NBYTES, FIRST, STEP = of.shift, (1 << of.shift) - 1, of.nbytes, of.first, of.step
    UNIT = np.float32(of.unit)
    small, less, LESS = _u8 if of.minima else _i8, _u8, 32
    if of.nibbles:
        small, less, LESS = _low_nibble, _high_nibble, 0

    @inlined
    def factor(scale, group, n):
        at = scale + (group >> SHIFT) * NBYTES
        return _half(at, n) * UNIT * small(at + FIRST + STEP * (group & MASK), n)

    @inlined
    def minimum(scale, group, n):
        at = scale + (group >> SHIFT) * NBYTES
        return _half(at + 64, n) * UNIT * less(at + FIRST + LESS + STEP * (group & MASK), n)

    return factor, minimum


_SUPER = {fmt: _superblock(of) for fmt, of in SUPERBLOCKS.items()}

_FACTOR = {
    **dict.fromkeys(("bf16", "f16"), _no_factor),
    "fp8": _for_block,
    "nvfp4": _nvfp4,
    **dict.fromkeys(("fp8-channel", "int8-channel", "int4-channel"), _for_outputs),
    **dict.fromkeys(("int4-zp", "int4-zp-g128"), _zero_factor),
    **{fmt: factor for fmt, (factor, _) in _SUPER.items()},
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", *TERNARY), _f16_groups),
    **dict.fromkeys(("q4_1", "q5_1"), _halves_factor),
}
"""format -> scale of output n's group; the others have bfloat16 groups."""

_MINIMUM: dict[str, Any] = {
    **dict.fromkeys(("int4-zp", "int4-zp-g128"), _zero_minimum),
    **{fmt: minimum for fmt, (_, minimum) in _SUPER.items() if SUPERBLOCKS[fmt].minima},
    **dict.fromkeys(("q4_1", "q5_1"), _halves_minimum),
}
"""format -> minimum of output n's group; the others have none."""


def make_tiles(fmt: str, activations: str) -> Any:
    """Compiles ``tiles``: see ``common``.

    With int8 activations all products and sums of a group are integers below 2**24: exact.
    """
    read_row, factor_of = _ROW[fmt], _FACTOR.get(fmt, _bf16_groups)
    minimum_of: Any = _MINIMUM.get(fmt)
    MINIMUM, INT8 = minimum_of is not None, activations == "int8"
    how = row_format(fmt, activations)
    ACT_K = how.act_k if how and INT8 else 1
    GROUP, BLOCK_BYTES = SCALE_K[fmt] or K_BLOCK, packed_bytes(fmt)

    @inlined
    def inputs(row, K, k):
        """Inputs k and k + 1."""
        if INT8:
            codes = carray(as_pointer(codes_at(row, K)), (k + 2,), types.int8)
            return types.float32(codes[k]), types.float32(codes[k + 1])
        word = _words(row + 2 * k, 1)[0]
        return _even(word), _odd(word)

    @routine(ARGUMENTS, f"{fmt}-{activations}")
    def tiles(M, w, then, scale, first, last, K, rows, tables, out):
        result = _floats(out, 32 * M)
        sums = _floats(stack_alloc(1024), 32 * M)  # [M, 32]
        even = _floats(stack_alloc(64), _PAIRS)
        odd = _floats(stack_alloc(64), _PAIRS)
        if first == 0:
            for i in range(32 * M):
                result[i] = types.float32(0)
        for first_k in range(first * K_BLOCK, last * K_BLOCK, GROUP):
            group = first_k // GROUP
            for i in range(32 * M):
                sums[i] = types.float32(0)
            for half in range(2):
                for k in range(first_k, first_k + GROUP, 2):
                    step, r = k % K_BLOCK // K_STEP, k % K_STEP // 2
                    read_row(w + k // K_BLOCK * BLOCK_BYTES, step, half, r, even, odd)
                    for t in range(M):
                        x0, x1 = inputs(i64(rows, t), K, k)
                        at = 32 * t + 16 * half
                        for n in range(_PAIRS):
                            sums[at + n] += even[n] * x0 + odd[n] * x1
            for n in range(32):
                factor = factor_of(scale, group, n)
                for t in range(M):
                    row = i64(rows, t)
                    x_scale = types.float32(1)
                    if INT8:
                        x_scale = activation_scale(row, K, first_k, ACT_K)
                    value = sums[32 * t + n] * x_scale * factor
                    if MINIMUM:
                        value -= group_sum(row, K, group) * x_scale * minimum_of(scale, group, n)
                    result[32 * t + n] += value
        return 0

    return tiles


def make_row(fmt: str) -> Callable:
    """``row(w, scale, n, K, out)``: output n of a packed block, dequantized, float32 [K] to out."""
    read_row, factor_of = _ROW[fmt], _FACTOR.get(fmt, _bf16_groups)
    minimum_of: Any = _MINIMUM.get(fmt)
    MINIMUM = minimum_of is not None
    GROUP, BLOCK_BYTES = SCALE_K[fmt] or K_BLOCK, packed_bytes(fmt)

    @inlined
    def row(w, scale, n, K, out):
        result = _floats(out, K)
        even = _floats(stack_alloc(64), _PAIRS)
        odd = _floats(stack_alloc(64), _PAIRS)
        half, column = n // 16, n % 16
        for first_k in range(0, K, GROUP):
            group = first_k // GROUP
            factor, low = factor_of(scale, group, n), types.float32(0)
            if MINIMUM:
                low = minimum_of(scale, group, n)
            for k in range(first_k, min(first_k + GROUP, K), 2):
                step, r = k % K_BLOCK // K_STEP, k % K_STEP // 2
                read_row(w + k // K_BLOCK * BLOCK_BYTES, step, half, r, even, odd)
                result[k] = even[column] * factor - low
                if k + 1 < K:
                    result[k + 1] = odd[column] * factor - low

    return row
