"""Vectors of floats in plain LLVM IR: one source for AVX-512, AVX2, NEON and whatever comes.

``V = make_vectors(16)`` is a module of functions that kernels call, each an operation that LLVM
has for vectors of any length and turns into the instructions of the target: ``V.fma(a, b, c)`` is
``vfmadd`` of a zmm register, or of two ymm. The small ops and attention are written with these;
the experts' tiles, where every instruction counts, name theirs (``avx512``, ``avx2``).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba.core import types

from ..target import Target
from .intrin.codegen import emits, llvm, load, pointer, shuffle, splat
from .intrin.registers import F32, I32, f32x8, f32x8_array, f32x16, f32x16_array

_E4M3_MAX, _E4M3_NORMAL = 0x43E00000, 0x3C800000  # bits of 448 and of 2**-6
_ARRAYS = {8: f32x8_array, 16: f32x16_array}


def width(target: Target) -> int:
    """Floats of a vector that suits the CPU."""
    return 8 if target.lacks(("avx512f",)) else 16


@functools.cache
def make_vectors(N: int) -> Any:
    """The module for vectors of N floats, 8 or 16; ``V.N`` is N.

    ``V.array(n)`` is an array of n registers (``registers``). Addresses are integers; of floats a
    multiple of 4, of bfloat16 of 2.
    """
    vector = {8: f32x8, 16: f32x16}[N]
    FLOATS, INTS = vector.ir_type, ir.VectorType(I32, N)
    HALVES, BYTES = (ir.VectorType(ir.IntType(bits), N) for bits in (16, 8))
    kind = f"v{N}f32"
    V: Any = ModuleType(f"{__name__}.x{N}")
    V.N, V.array, V.type = N, _ARRAYS[N], vector

    def ints(value):
        return ir.Constant(INTS, [value] * N)

    def gives(result, *operands):
        def decorate(emit):
            setattr(V, emit.__name__, emits(result, *operands)(emit))
            return emit

        return decorate

    def reduced(builder, value, combine):
        count = N // 2
        while count:
            low, high = (
                shuffle(builder, value, value, list(range(at, at + count))) for at in (0, count)
            )
            value = combine(low, high)
            count //= 2
        return builder.extract_element(value, I32(0))

    @gives(vector)
    def zero(builder):
        return ir.Constant(FLOATS, None)

    @gives(vector, types.float32)
    def broadcast(builder, scalar):
        return splat(builder, scalar, FLOATS)

    @gives(vector, types.intp)
    def broadcast_at(builder, address):
        return splat(builder, load(builder, address, F32, 4), FLOATS)

    @gives(vector, types.intp)
    def load_f32(builder, address):
        return load(builder, address, FLOATS, 4)

    @gives(types.void, types.intp, vector)
    def store_f32(builder, address, value):
        builder.store(value, pointer(builder, address, FLOATS)).align = 4

    @gives(vector, types.intp)
    def load_bf16(builder, address):
        """N bfloat16 as floats."""
        words = builder.zext(load(builder, address, HALVES, 2), INTS)
        return builder.bitcast(builder.shl(words, ints(16)), FLOATS)

    @gives(vector, types.intp)
    def load_bf16_even(builder, address):
        """Numbers 0, 2, ... of 2 N bfloat16, as floats."""
        words = load(builder, address, INTS, 2)
        return builder.bitcast(builder.shl(words, ints(16)), FLOATS)

    @gives(vector, types.intp)
    def load_bf16_odd(builder, address):
        """Numbers 1, 3, ... of 2 N bfloat16, as floats."""
        words = load(builder, address, INTS, 2)
        return builder.bitcast(builder.and_(words, ints(0xFFFF0000)), FLOATS)

    def e4m3(builder, words, byte):
        """Byte ``byte`` of each word, as 2**-120 of its number: ``pairs_of_e4m3``'s bits."""
        top = builder.shl(words, ints(24 - 8 * byte))
        found = builder.and_(builder.ashr(top, ints(4)), ints(0x87F00000))
        return builder.bitcast(found, FLOATS)

    @gives(vector, types.intp)
    def load_e4m3(builder, address):
        """N E4M3 as floats, 2**-120 of each; NaN as 480."""
        return e4m3(builder, builder.zext(load(builder, address, BYTES, 1), INTS), 0)

    @gives(vector, types.intp)
    def load_e4m3_even(builder, address):
        """Numbers 0, 2, ... of 2 N E4M3, likewise."""
        return e4m3(builder, builder.zext(load(builder, address, HALVES, 1), INTS), 0)

    @gives(vector, types.intp)
    def load_e4m3_odd(builder, address):
        """Numbers 1, 3, ... of 2 N E4M3, likewise."""
        return e4m3(builder, builder.zext(load(builder, address, HALVES, 1), INTS), 1)

    @gives(types.void, types.intp, vector)
    def store_e4m3(builder, address, value):
        """N floats as E4M3, rounded to nearest even, at most 448; NaN stays NaN."""
        bits = builder.bitcast(value, INTS)
        size = builder.and_(bits, ints(0x7FFFFFFF))
        most = ints(_E4M3_MAX)
        size = builder.select(builder.icmp_unsigned("<", size, most), size, most)
        tie = builder.and_(builder.lshr(size, ints(20)), ints(1))
        rounded = builder.lshr(builder.add(builder.add(size, ints(0x7FFFF)), tie), ints(20))
        normal = builder.sub(rounded, ints((127 - 7) << 3))
        # Below 2**-6 a step is 2**-9, the last bit of 2**14.
        magic = ir.Constant(FLOATS, [float(1 << 14)] * N)
        small = builder.bitcast(builder.fadd(builder.bitcast(size, FLOATS), magic), INTS)
        small = builder.and_(small, ints(0xFF))
        code = builder.select(builder.icmp_unsigned("<", size, ints(_E4M3_NORMAL)), small, normal)
        code = builder.select(builder.fcmp_unordered("uno", value, value), ints(0x7F), code)
        code = builder.or_(code, builder.and_(builder.lshr(bits, ints(24)), ints(0x80)))
        builder.store(builder.trunc(code, BYTES), pointer(builder, address, BYTES)).align = 1

    @gives(types.void, types.intp, vector)
    def store_bf16(builder, address, value):
        """N floats as bfloat16, rounded to nearest even; NaN stays NaN."""
        bits = builder.bitcast(value, INTS)
        tie = builder.and_(builder.lshr(bits, ints(16)), ints(1))
        rounded = builder.add(builder.add(bits, ints(0x7FFF)), tie)
        quiet = builder.or_(bits, ints(0x400000))
        number = builder.fcmp_unordered("uno", value, value)
        upper = builder.lshr(builder.select(number, quiet, rounded), ints(16))
        builder.store(builder.trunc(upper, HALVES), pointer(builder, address, HALVES)).align = 2

    @gives(types.void, types.intp, vector, vector)
    def store_interleaved(builder, address, even, odd):
        """2 N floats: ``even[0], odd[0], even[1], ...``."""
        order = [lane + N * which for lane in range(N) for which in (0, 1)]
        for part in range(2):
            half = shuffle(builder, even, odd, order[N * part : N * (part + 1)])
            at = builder.add(address, ir.IntType(64)(4 * N * part))
            builder.store(half, pointer(builder, at, FLOATS)).align = 4

    @gives(vector, vector, vector, vector)
    def fma(builder, a, b, c):
        """``a * b + c``, rounded once."""
        return llvm(builder, f"llvm.fma.{kind}", FLOATS, a, b, c)

    @gives(vector, vector, vector)
    def add(builder, a, b):
        return builder.fadd(a, b)

    @gives(vector, vector, vector)
    def sub(builder, a, b):
        return builder.fsub(a, b)

    @gives(vector, vector, vector)
    def mul(builder, a, b):
        return builder.fmul(a, b)

    @gives(vector, vector, vector)
    def div(builder, a, b):
        return builder.fdiv(a, b)

    @gives(vector, vector)
    def absolute(builder, value):
        bits = builder.and_(builder.bitcast(value, INTS), ints(0x7FFFFFFF))
        return builder.bitcast(bits, FLOATS)

    @gives(vector, vector, vector)
    def largest(builder, a, b):
        """The larger of each pair; of a NaN and a number either."""
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    @gives(types.float32, vector)
    def sum(builder, value):
        """Sum of all lanes, by halves."""
        return reduced(builder, value, builder.fadd)

    @gives(types.float32, vector)
    def maximum(builder, value):
        """Largest of all lanes."""

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return reduced(builder, value, larger)

    @gives(vector, vector)
    def round(builder, value):
        """Rounds to the nearest whole number, ties to even."""
        return llvm(builder, f"llvm.rint.{kind}", FLOATS, value)

    @gives(vector, vector, vector)
    def scale_exp2(builder, value, n):
        """``value * 2**n`` for whole n in -126 .. 127."""
        exponent = builder.shl(builder.add(builder.fptosi(n, INTS), ints(127)), ints(23))
        return builder.fmul(value, builder.bitcast(exponent, FLOATS))

    @gives(vector, vector, types.int64)
    def first_lanes(builder, value, count):
        """The first ``count`` lanes; the others 0."""
        lanes = ir.Constant(INTS, list(range(N)))
        limit = splat(builder, builder.trunc(count, I32), INTS)
        return builder.select(
            builder.icmp_signed("<", lanes, limit), value, ir.Constant(FLOATS, None)
        )

    @gives(types.float32, vector)
    def first(builder, value):
        """Lane 0."""
        return builder.extract_element(value, I32(0))

    @gives(vector, vector, vector, vector, vector)
    def where_less(builder, a, b, then, other):
        """``then`` in lanes where ``a < b``, else (NaN too) ``other``."""
        return builder.select(builder.fcmp_ordered("<", a, b), then, other)

    @gives(vector, vector, types.int64, types.int64, vector)
    def keep_lanes(builder, value, start, end, other):
        """Lanes from ``start`` to before ``end`` (of 32 bits) of ``value``, else ``other``'s."""
        lanes = ir.Constant(INTS, list(range(N)))
        low, high = (splat(builder, builder.trunc(x, I32), INTS) for x in (start, end))
        within = builder.and_(
            builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
        )
        return builder.select(within, value, other)

    return V
