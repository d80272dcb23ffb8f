"""AVX2 and FMA, one instruction a function. Addresses are plain integers.

Registers are ``f32x8`` and ``i32x8``; the latter also holds 16 words or 32 bytes, as each function
says. A kernel that uses these is only compiled after ``registry`` has checked the target.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .codegen import emits, llvm, load, pointer, shuffle, splat
from .registers import I8, I32, f32x8, i32x8

_F32X8, _I32X8 = f32x8.ir_type, i32x8.ir_type
_I16X16 = ir.VectorType(ir.IntType(16), 16)
_I8X32 = ir.VectorType(I8, 32)
_I8X8 = ir.VectorType(I8, 8)


def _all(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def _sum(builder, vector, add):
    """Sum of 8 lanes, by halves."""
    for count in (4, 2, 1):
        low, high = (
            shuffle(builder, vector, vector, list(range(at, at + count))) for at in (0, count)
        )
        vector = add(low, high)
    return builder.extract_element(vector, I32(0))


def _interleave_with_zero(builder, value, first):
    """16 words: upper bytes from ``first`` on of each 16-byte lane, lower bytes zero."""
    order = [byte for lane in (0, 16) for at in range(first, first + 8) for byte in (32, lane + at)]
    words = shuffle(builder, builder.bitcast(value, _I8X32), _all(_I8X32, 0), order)
    return builder.bitcast(words, _I32X8)


def _bytes(builder, name, result, *operands):
    """The LLVM intrinsic ``name`` of 32 bytes."""
    found = llvm(builder, name, result, *(builder.bitcast(x, _I8X32) for x in operands))
    return builder.bitcast(found, _I32X8)


# Memory


@emits(f32x8)
def zero_f32(builder):
    """8 zeros."""
    return ir.Constant(_F32X8, None)


@emits(i32x8)
def zero_i32(builder):
    """8 zeros."""
    return ir.Constant(_I32X8, None)


@emits(f32x8, types.intp)
def load_f32(builder, address):
    """8 floats from a 4-byte-aligned address (``vmovups``)."""
    return load(builder, address, _F32X8, 4)


@emits(i32x8, types.intp)
def load_i32(builder, address):
    """32 bytes from any address (``vmovdqu``)."""
    return load(builder, address, _I32X8, 1)


@emits(types.void, types.intp, f32x8)
def store_f32(builder, address, value):
    """8 floats to a 4-byte-aligned address (``vmovups``)."""
    builder.store(value, pointer(builder, address, _F32X8)).align = 4


@emits(types.void, types.intp, i32x8)
def store_i32(builder, address, value):
    """32 bytes to any address (``vmovdqu``)."""
    builder.store(value, pointer(builder, address, _I32X8)).align = 1


@emits(f32x8, types.intp)
def load_bf16(builder, address):
    """8 bf16 as floats (``vpmovzxwd``, ``vpslld``)."""
    words = builder.zext(load(builder, address, ir.VectorType(ir.IntType(16), 8), 2), _I32X8)
    return builder.bitcast(builder.shl(words, _all(_I32X8, 16)), _F32X8)


@emits(f32x8, types.intp)
def load_f16(builder, address):
    """8 IEEE halves as floats (``vcvtph2ps``, F16C)."""
    return builder.fpext(load(builder, address, ir.VectorType(ir.HalfType(), 8), 2), _F32X8)


@emits(f32x8, types.intp)
def load_u8_as_f32(builder, address):
    """8 unsigned bytes as floats (``vpmovzxbd``, ``vcvtdq2ps``)."""
    return builder.sitofp(builder.zext(load(builder, address, _I8X8, 1), _I32X8), _F32X8)


@emits(f32x8, types.intp)
def load_e4m3_halved(builder, address):
    """Half of 8 bytes of E4M3, 0 to 448, as floats (``vpmovzxbd``, ``vpslld``, ``vmulps``)."""
    wide = builder.zext(load(builder, address, _I8X8, 1), _I32X8)
    bits = builder.shl(wide, _all(_I32X8, 20))
    return builder.fmul(builder.bitcast(bits, _F32X8), _all(_F32X8, 2.0**119))


@emits(f32x8, types.intp)
def load_i8_as_f32(builder, address):
    """8 signed bytes as floats (``vpmovsxbd``, ``vcvtdq2ps``)."""
    return builder.sitofp(builder.sext(load(builder, address, _I8X8, 1), _I32X8), _F32X8)


@emits(i32x8, types.intp)
def load_i8_as_word_pairs(builder, address):
    """8 signed bytes, each as two adjacent words (``vpunpcklbw``, ``vpmovsxbw``)."""
    bytes_ = load(builder, address, _I8X8, 1)
    twice = shuffle(builder, bytes_, bytes_, [i // 2 for i in range(16)])
    return builder.bitcast(builder.sext(twice, _I16X16), _I32X8)


@emits(i32x8, types.intp)
def load_u8_as_i32(builder, address):
    """8 unsigned bytes as integers (``vpmovzxbd``)."""
    return builder.zext(load(builder, address, _I8X8, 1), _I32X8)


@emits(i32x8, types.intp)
def load_i8_as_i32(builder, address):
    """8 signed bytes as integers (``vpmovsxbd``)."""
    return builder.sext(load(builder, address, _I8X8, 1), _I32X8)


@emits(f32x8, types.float32)
def broadcast_f32(builder, value):
    """A float in all 8 lanes."""
    return splat(builder, value, _F32X8)


@emits(f32x8, types.intp)
def broadcast_f32_at(builder, address):
    """The float at an address in all 8 lanes (``vbroadcastss m32``)."""
    return splat(builder, load(builder, address, ir.FloatType(), 4), _F32X8)


@emits(f32x8, types.intp)
def broadcast_pair_at(builder, address):
    """Two floats from an address, four times (``vbroadcastsd m64``)."""
    pair = load(builder, address, ir.VectorType(ir.FloatType(), 2), 4)
    return shuffle(builder, pair, pair, [0, 1] * 4)


@emits(i32x8, types.intp)
def broadcast_i32(builder, value):
    """An integer in all 8 lanes."""
    return splat(builder, builder.trunc(value, I32), _I32X8)


@emits(i32x8, types.intp)
def broadcast_i32_at(builder, address):
    """The four bytes at an address in all 8 lanes (``vpbroadcastd m32``)."""
    return splat(builder, load(builder, address, I32, 1), _I32X8)


# Floats


@emits(f32x8, f32x8, f32x8)
def add_f32(builder, a, b):
    """``a + b`` (``vaddps``)."""
    return builder.fadd(a, b)


@emits(f32x8, f32x8, f32x8)
def sub_f32(builder, a, b):
    """``a - b`` (``vsubps``)."""
    return builder.fsub(a, b)


@emits(f32x8, f32x8, f32x8)
def mul_f32(builder, a, b):
    """``a * b`` (``vmulps``)."""
    return builder.fmul(a, b)


@emits(f32x8, f32x8, f32x8)
def div_f32(builder, a, b):
    """``a / b`` (``vdivps``)."""
    return builder.fdiv(a, b)


@emits(f32x8, f32x8, f32x8, f32x8)
def fma_f32(builder, a, b, c):
    """``a * b + c`` (``vfmadd231ps``)."""
    return llvm(builder, "llvm.fma.v8f32", _F32X8, a, b, c)


@emits(f32x8, f32x8, f32x8, f32x8)
def fnma_f32(builder, a, b, c):
    """``c - a * b`` (``vfnmadd231ps``)."""
    return llvm(builder, "llvm.fma.v8f32", _F32X8, builder.fneg(a), b, c)


@emits(f32x8, f32x8, f32x8)
def min_f32(builder, a, b):
    """The smaller; ``b`` where one is NaN (``vminps``)."""
    return llvm(builder, "llvm.x86.avx.min.ps.256", _F32X8, a, b)


@emits(f32x8, f32x8, f32x8)
def max_f32(builder, a, b):
    """The larger; ``b`` where one is NaN (``vmaxps``)."""
    return llvm(builder, "llvm.x86.avx.max.ps.256", _F32X8, a, b)


@emits(f32x8, f32x8)
def abs_f32(builder, a):
    """``|a|`` (``vandps``)."""
    return llvm(builder, "llvm.fabs.v8f32", _F32X8, a)


@emits(f32x8, f32x8)
def round_f32(builder, a):
    """Rounds to the nearest whole number, ties to even (``vroundps``)."""
    return llvm(builder, "llvm.nearbyint.v8f32", _F32X8, a)


@emits(f32x8, f32x8, f32x8)
def scale_exp2_f32(builder, a, n):
    """``a * 2**n`` for whole n, at most 250 from 0, with correct under- and overflow: two
    multiplications by powers that are normal numbers."""
    n = llvm(builder, "llvm.x86.avx.cvt.ps2dq.256", _I32X8, n)
    half = builder.ashr(n, _all(_I32X8, 1))
    for power in (half, builder.sub(n, half)):
        bits = builder.shl(builder.add(power, _all(_I32X8, 127)), _all(_I32X8, 23))
        a = builder.fmul(a, builder.bitcast(bits, _F32X8))
    return a


@emits(types.void, types.intp, f32x8)
def store_bf16(builder, address, value):
    """8 floats rounded to nearest-even bf16, to a 2-byte-aligned address; NaN stays NaN."""
    bits = builder.bitcast(value, _I32X8)
    tie = builder.and_(builder.lshr(bits, _all(_I32X8, 16)), _all(_I32X8, 1))
    rounded = builder.add(bits, builder.add(tie, _all(_I32X8, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, _all(_I32X8, 0x400000))
    upper = builder.lshr(builder.select(nan, quiet, rounded), _all(_I32X8, 16))
    words = builder.trunc(upper, ir.VectorType(ir.IntType(16), 8))
    builder.store(words, pointer(builder, address, words.type)).align = 2


@emits(types.float32, f32x8)
def sum_f32(builder, a):
    """The sum of the 8 floats, by halves."""
    return _sum(builder, a, builder.fadd)


@emits(types.float32, f32x8)
def largest_f32(builder, a):
    """The largest of 8 floats that are no NaN."""
    return llvm(builder, "llvm.vector.reduce.fmax.v8f32", ir.FloatType(), a)


@emits(f32x8, i32x8)
def first_of_pairs(builder, pairs):
    """The first bf16 of 8 pairs as floats (``vpslld``): a bf16 is the upper half of one."""
    return builder.bitcast(builder.shl(pairs, _all(_I32X8, 16)), _F32X8)


@emits(f32x8, i32x8)
def second_of_pairs(builder, pairs):
    """The second bf16 of 8 pairs as floats (``vpand``)."""
    return builder.bitcast(builder.and_(pairs, _all(_I32X8, 0xFFFF0000)), _F32X8)


@emits(f32x8, i32x8)
def to_f32(builder, a):
    """8 integers as floats (``vcvtdq2ps``)."""
    return builder.sitofp(a, _F32X8)


@emits(i32x8, f32x8)
def to_i32(builder, a):
    """8 floats to the nearest integers, ties to even (``vcvtps2dq``)."""
    return llvm(builder, "llvm.x86.avx.cvt.ps2dq.256", _I32X8, a)


@emits(f32x8, i32x8)
def bits_as_f32(builder, a):
    """The same bits as floats."""
    return builder.bitcast(a, _F32X8)


@emits(f32x8, f32x8, f32x8)
def even_lanes(builder, a, b):
    """Lanes 0, 2, 4, 6 of a, then of b (``vshufps``, ``vpermpd``)."""
    return shuffle(builder, a, b, list(range(0, 16, 2)))


@emits(f32x8, f32x8, f32x8)
def odd_lanes(builder, a, b):
    """Lanes 1, 3, 5, 7 of a, then of b."""
    return shuffle(builder, a, b, list(range(1, 16, 2)))


@emits(i32x8, f32x8)
def bits_as_i32(builder, a):
    """The same bits as integers."""
    return builder.bitcast(a, _I32X8)


# Integers; words are 16 bits


@emits(i32x8, i32x8, i32x8)
def add_i32(builder, a, b):
    """``a + b`` (``vpaddd``)."""
    return builder.add(a, b)


@emits(i32x8, i32x8, i32x8)
def mul_i32(builder, a, b):
    """Products modulo 2**32 (``vpmulld``)."""
    return builder.mul(a, b)


@emits(i32x8, i32x8, i32x8)
def and_i32(builder, a, b):
    """``a & b`` (``vpand``)."""
    return builder.and_(a, b)


@emits(i32x8, i32x8, i32x8)
def or_i32(builder, a, b):
    """``a | b`` (``vpor``)."""
    return builder.or_(a, b)


@emits(i32x8, i32x8, i32x8)
def xor_i32(builder, a, b):
    """``a ^ b`` (``vpxor``)."""
    return builder.xor(a, b)


@emits(i32x8, i32x8, i32x8)
def sub_i8(builder, a, b):
    """``a - b`` of 32 bytes (``vpsubb``)."""
    a, b = builder.bitcast(a, _I8X32), builder.bitcast(b, _I8X32)
    return builder.bitcast(builder.sub(a, b), _I32X8)


@emits(i32x8, i32x8)
def shift_slice(builder, a):
    """``(a + 128) >> 8``: what is left above a signed byte."""
    return builder.ashr(builder.add(a, _all(_I32X8, 128)), _all(_I32X8, 8))


@emits(types.void, types.intp, i32x8)
def store_low_bytes(builder, address, a):
    """The low byte of each of 8 integers, to 8 bytes at any address."""
    builder.store(builder.trunc(a, _I8X8), pointer(builder, address, _I8X8)).align = 1


@emits(types.int32, i32x8)
def low_bytes_i32(builder, a):
    """The bits that are set in a low byte of any of 8 integers."""
    bits = llvm(builder, "llvm.vector.reduce.or.v8i32", I32, a)
    return builder.and_(bits, ir.Constant(I32, 255))


@emits(i32x8, i32x8, i32x8)
def add_words(builder, a, b):
    """``a + b`` of 16 words (``vpaddw``)."""
    a, b = builder.bitcast(a, _I16X16), builder.bitcast(b, _I16X16)
    return builder.bitcast(builder.add(a, b), _I32X8)


def _shift(name, operation, vector, doc):
    """``name(a, count)``; the count is a literal."""

    def shift(typingctx, a, count):
        bits = count.literal_value

        def codegen(context, builder, sig, args):
            value = builder.bitcast(args[0], vector)
            shifted = getattr(builder, operation)(value, _all(vector, bits))
            return builder.bitcast(shifted, _I32X8)

        return i32x8(i32x8, count), codegen

    shift.__name__, shift.__doc__ = name, doc
    return intrinsic(prefer_literal=True)(shift)


shift_left_i32 = _shift("shift_left_i32", "shl", _I32X8, "``a << count`` (``vpslld``).")
shift_right_i32 = _shift("shift_right_i32", "ashr", _I32X8, "Signed ``a >> count`` (``vpsrad``).")
shift_right_u32 = _shift("shift_right_u32", "lshr", _I32X8, "Unsigned ``a >> count`` (``vpsrld``).")
shift_left_words = _shift("shift_left_words", "shl", _I16X16, "Of 16 words (``vpsllw``).")
shift_right_words = _shift("shift_right_words", "ashr", _I16X16, "Of signed words (``vpsraw``).")
shift_right_u16 = _shift("shift_right_u16", "lshr", _I16X16, "Of unsigned words (``vpsrlw``).")


@emits(i32x8, i32x8, types.intp)
def shift_right_u16_by(builder, a, count):
    """Unsigned words ``a >> count``, a count that need not be a literal (``vpsrlw``)."""
    by = splat(builder, builder.trunc(count, _I16X16.element), _I16X16)
    return builder.bitcast(builder.lshr(builder.bitcast(a, _I16X16), by), _I32X8)


@emits(i32x8, i32x8, i32x8)
def dot_u8i8(builder, a, b):
    """Sums of pairs of 32 unsigned bytes times 32 signed ones, as saturated words
    (``vpmaddubsw``)."""
    return _bytes(builder, "llvm.x86.avx2.pmadd.ub.sw", _I16X16, a, b)


@emits(i32x8, i32x8, i32x8)
def dot_words(builder, a, b):
    """Sums of pairs of 16 signed words times 16 (``vpmaddwd``)."""
    a, b = builder.bitcast(a, _I16X16), builder.bitcast(b, _I16X16)
    return llvm(builder, "llvm.x86.avx2.pmadd.wd", _I32X8, a, b)


@emits(i32x8, i32x8, i32x8, i32x8)
def dpbusd(builder, total, a, b):
    """``total`` plus, of 32 unsigned bytes by 32 signed ones, the sums of fours (``vpdpbusd``,
    AVX-VNNI)."""
    return llvm(builder, "llvm.x86.avx512.vpdpbusd.256", _I32X8, total, a, b)


@emits(i32x8, i32x8, i32x8, i32x8)
def dpwssd(builder, total, a, b):
    """``total`` plus, of 16 signed words by 16, the sums of pairs (``vpdpwssd``, AVX-VNNI)."""
    return llvm(builder, "llvm.x86.avx512.vpdpwssd.256", _I32X8, total, a, b)


@emits(i32x8, i32x8, i32x8)
def sign_i8(builder, a, b):
    """32 bytes ``a``, negated where ``b`` is negative, 0 where it is 0 (``vpsignb``)."""
    return _bytes(builder, "llvm.x86.avx2.psign.b", _I8X32, a, b)


@emits(i32x8, i32x8)
def abs_i8(builder, a):
    """``|a|`` of 32 bytes (``vpabsb``)."""
    value = builder.bitcast(a, _I8X32)
    found = llvm(builder, "llvm.abs.v32i8", _I8X32, value, ir.Constant(ir.IntType(1), 0))
    return builder.bitcast(found, _I32X8)


@emits(i32x8, i32x8, i32x8)
def lookup_16(builder, table, index):
    """``table[index & 15]`` per byte, in each 16-byte lane; 0 where the index is negative
    (``vpshufb``)."""
    return _bytes(builder, "llvm.x86.avx2.pshuf.b", _I8X32, table, index)


@emits(i32x8, types.intp)
def expand_bits(builder, address):
    """The 32 bits at an address as bytes, 255 where one is set, the lowest first (``vpbroadcastd``,
    ``vpshufb``, ``vpand``, ``vpcmpeqb``)."""
    mask = splat(builder, load(builder, address, I32, 1), _I32X8)
    bits = ir.Constant(_I8X32, [1 << i % 8 for i in range(32)])
    own = [16 * (i // 16) + i // 8 for i in range(32)]  # every lane has all four bytes
    own = shuffle(builder, builder.bitcast(mask, _I8X32), _all(_I8X32, 0), own)
    same = builder.icmp_unsigned("==", builder.and_(own, bits), bits)
    return builder.bitcast(builder.sext(same, _I8X32), _I32X8)


@emits(i32x8, i32x8)
def low_bytes_to_words(builder, a):
    """The lower 8 bytes of each 16-byte lane as upper bytes of words (``vpunpcklbw``)."""
    return _interleave_with_zero(builder, a, 0)


@emits(i32x8, i32x8)
def high_bytes_to_words(builder, a):
    """The upper 8 bytes of each 16-byte lane as upper bytes of words (``vpunpckhbw``)."""
    return _interleave_with_zero(builder, a, 8)


@emits(types.int32, i32x8)
def sum_i32(builder, a):
    """The sum of the 8 integers."""
    return _sum(builder, a, builder.add)
