"""Loads of halves of bytes, in vectors of AVX2 and of AVX-512. Addresses are plain integers.

See ``avx2`` and ``avx512``: a kernel that uses these is only compiled after ``registry`` has
checked the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba.core import types

from ..intrin.codegen import emits, load, shuffle
from ..intrin.registers import I8, Register, f32x8, f32x16, i32x8, i32x16, u8x64


@dataclass(frozen=True)
class Nibbles:
    """Loads of as many bytes as a register has lanes of 32 bits, each ``load(address)``.

    Attributes:
        low_as_f32: their low halves, as floats.
        high_as_f32: their high halves.
        low_as_i32: their low halves, as integers.
        low_as_word_pairs: the same, each as two adjacent words.
    """

    low_as_f32: Callable
    high_as_f32: Callable
    low_as_i32: Callable
    low_as_word_pairs: Callable


def _all(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def _make(floats: Register, integers: Register, words: Register) -> Nibbles:
    lanes = integers.ir_type
    bytes_ = ir.VectorType(I8, lanes.count)
    pairs = ir.VectorType(ir.IntType(16), 2 * lanes.count)

    def wide(builder, address):
        return builder.zext(load(builder, address, bytes_, 1), lanes)

    @emits(floats, types.intp)
    def low_as_f32(builder, address):
        """``vpmovzxbd``, ``vpand``, ``vcvtdq2ps``."""
        return builder.sitofp(builder.and_(wide(builder, address), _all(lanes, 15)), floats.ir_type)

    @emits(floats, types.intp)
    def high_as_f32(builder, address):
        """``vpmovzxbd``, ``vpsrld``, ``vcvtdq2ps``."""
        return builder.sitofp(builder.lshr(wide(builder, address), _all(lanes, 4)), floats.ir_type)

    @emits(integers, types.intp)
    def low_as_i32(builder, address):
        """``vpmovzxbd``, ``vpand``."""
        return builder.and_(wide(builder, address), _all(lanes, 15))

    @emits(words, types.intp)
    def low_as_word_pairs(builder, address):
        """``vpunpcklbw``, ``vpmovzxbw``, ``vpand``."""
        found = load(builder, address, bytes_, 1)
        twice = shuffle(builder, found, found, [i // 2 for i in range(pairs.count)])
        low = builder.and_(builder.zext(twice, pairs), _all(pairs, 15))
        return builder.bitcast(low, words.ir_type)

    return Nibbles(low_as_f32, high_as_f32, low_as_i32, low_as_word_pairs)


OF_8, OF_16 = _make(f32x8, i32x8, i32x8), _make(f32x16, i32x16, u8x64)
"""Of registers of AVX2 and of AVX-512."""
