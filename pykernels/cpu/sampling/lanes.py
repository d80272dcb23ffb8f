"""What sampling asks of vectors beyond ``cpu.vectors``: masks as bits, Philox, log and exp."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ...ref.sampling import PHILOX_FACTORS, PHILOX_KEYS, PHILOX_ROUNDS
from ..intrin.codegen import emits, shuffle, splat
from ..intrin.registers import I32, I64
from ..jit import inlined
from ..vectors import make_vectors

_SQRT_HALF = 0x3F3504F3  # bits of sqrt(1/2)
_UNDERFLOW = np.float32(-87.0)  # exp of less counts as 0: from here on it is no normal number
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOG = tuple(  # Cephes' logf, from the highest power down to the third
    np.float32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
_EXP = tuple(  # Cephes' expf, from the highest power down to the second
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)


@functools.cache
def make_lanes(N: int) -> Any:
    """The module for vectors of N floats (``make_vectors``). A mask is an int64 with bit i of
    lane i."""
    V = make_vectors(N)
    vector = V.type
    FLOATS, INTS = vector.ir_type, ir.VectorType(I32, N)
    L: Any = ModuleType(f"{__name__}.x{N}")

    def ints(value):
        return ir.Constant(INTS, [value] * N)

    def gives(result, *operands):
        def decorate(emit):
            setattr(L, emit.__name__, emits(result, *operands)(emit))
            return emit

        return decorate

    def as_bits(builder, lanes):
        return builder.zext(builder.bitcast(lanes, ir.IntType(N)), I64)

    @gives(types.int64, vector, vector)
    def at_least(builder, a, b):
        """Where a >= b; false for NaN."""
        return as_bits(builder, builder.fcmp_ordered(">=", a, b))

    @gives(types.int64, vector, vector)
    def above(builder, a, b):
        """Where a > b; false for NaN."""
        return as_bits(builder, builder.fcmp_ordered(">", a, b))

    @gives(types.int64, vector, vector)
    def equal(builder, a, b):
        """Where a == b; false for NaN."""
        return as_bits(builder, builder.fcmp_ordered("==", a, b))

    @gives(vector, types.int64, vector, vector)
    def pick(builder, mask, a, b):
        """a where the mask's bit is set, else b."""
        lanes = builder.trunc(mask, ir.IntType(N))
        return builder.select(builder.bitcast(lanes, ir.VectorType(ir.IntType(1), N)), a, b)

    @gives(types.int64, types.int64)
    def lowest(builder, mask):
        """The lowest lane whose bit is set; of a mask that has one."""
        return builder.cttz(mask, ir.IntType(1)(1))

    @gives(vector, vector, vector)
    def poison(builder, seen, value):
        """``seen``, but NaN in the lanes where ``value`` is."""
        number = builder.fcmp_unordered("uno", value, value)
        return builder.select(number, builder.bitcast(ints(-1), FLOATS), seen)

    @gives(vector)
    def lane_numbers(builder):
        return ir.Constant(FLOATS, [float(lane) for lane in range(N)])

    @gives(vector, vector)
    def exponent(builder, value):
        """e of ``value = m * 2**e`` with m in sqrt(1/2) .. sqrt(2); positive normal numbers."""
        shifted = builder.sub(builder.bitcast(value, INTS), ints(_SQRT_HALF))
        return builder.sitofp(builder.ashr(shifted, ints(23)), FLOATS)

    @gives(vector, vector)
    def mantissa(builder, value):
        """m of the same."""
        bits = builder.bitcast(value, INTS)
        shifted = builder.sub(bits, ints(_SQRT_HALF))
        power = builder.and_(shifted, ints(0xFF800000))
        return builder.bitcast(builder.sub(bits, power), FLOATS)

    @gives(vector, *[types.int64] * 5)
    def uniform(builder, first, key_low, key_high, draws_low, draws_high):
        """Uniforms of tokens ``first, first + 1, ...``, in (0, 1), exactly as in ``ref.sampling``.

        A 32-bit word lies in the low half of each 64-bit lane, whose upper half is anything: a
        product then has both of its halves where the next round wants them.
        """
        LONGS = ir.VectorType(I64, N // 2)

        def longs(value):
            return ir.Constant(LONGS, [value] * (N // 2))

        def product(word, factor):
            return builder.mul(builder.and_(word, longs(0xFFFFFFFF)), longs(factor))

        def words(half):
            lanes = ir.Constant(LONGS, list(range(half * N // 2, (half + 1) * N // 2)))
            c0, c1 = builder.add(splat(builder, first, LONGS), lanes), longs(0)
            c2, c3 = splat(builder, draws_low, LONGS), splat(builder, draws_high, LONGS)
            k0, k1 = key_low, key_high
            for _ in range(PHILOX_ROUNDS):
                p0, p1 = product(c0, PHILOX_FACTORS[0]), product(c2, PHILOX_FACTORS[1])
                high0, high1 = (builder.lshr(p, longs(32)) for p in (p0, p1))
                c0 = builder.xor(builder.xor(high1, c1), splat(builder, k0, LONGS))
                c2 = builder.xor(builder.xor(high0, c3), splat(builder, k1, LONGS))
                c1, c3 = p1, p0
                k0 = builder.add(k0, I64(PHILOX_KEYS[0]))
                k1 = builder.add(k1, I64(PHILOX_KEYS[1]))
            return builder.trunc(c0, ir.VectorType(I32, N // 2))

        both = shuffle(builder, words(0), words(1), list(range(N)))
        number = builder.sitofp(builder.lshr(both, ints(9)), FLOATS)
        half = ir.Constant(FLOATS, [0.5] * N)
        return builder.fmul(builder.fadd(number, half), ir.Constant(FLOATS, [2.0**-23] * N))

    @inlined
    def polynomial(x, coefficients):
        value = V.broadcast(coefficients[0])
        for i in range(1, len(coefficients)):
            value = V.fma(value, x, V.broadcast(coefficients[i]))
        return value

    @inlined
    def log(value):
        """Natural logarithm of positive normal numbers, to about an ulp."""
        e, x = L_exponent(value), V.sub(L_mantissa(value), V.broadcast(_ONE))
        square = V.mul(x, x)
        rest = V.mul(polynomial(x, _LOG), V.mul(x, square))
        rest = V.fma(e, V.broadcast(_LN2_LOW), rest)
        rest = V.fma(V.broadcast(-_HALF), square, rest)
        return V.fma(e, V.broadcast(_LN2_HIGH), V.add(x, rest))

    @inlined
    def exp(value):
        """e to the power of numbers up to 0, to about an ulp; 0 below -87."""
        x = V.largest(value, V.broadcast(_UNDERFLOW))
        n = V.round(V.mul(x, V.broadcast(_LOG2_E)))
        x = V.fma(n, V.broadcast(-_LN2_HIGH), x)
        x = V.fma(n, V.broadcast(-_LN2_LOW), x)
        power = V.fma(polynomial(x, _EXP), V.mul(x, x), V.add(x, V.broadcast(_ONE)))
        kept = L_at_least(value, V.broadcast(_UNDERFLOW))
        return L_pick(kept, V.scale_exp2(power, n), V.zero())

    L_exponent, L_mantissa, L_at_least, L_pick = L.exponent, L.mantissa, L.at_least, L.pick
    L_uniform = L.uniform

    @inlined
    def gumbel(first, key_low, key_high, draws_low, draws_high):
        """The noise of tokens ``first, first + 1, ...``, -2.82 .. 16.64."""
        u = L_uniform(first, key_low, key_high, draws_low, draws_high)
        return V.sub(V.zero(), log(V.sub(V.zero(), log(u))))

    L.log, L.exp, L.gumbel = log, exp, gumbel
    return L
