"""AVX-512 on floats, one instruction a function. Addresses are plain integers.

Compiling one of these for a CPU that lacks it aborts the process inside LLVM, so a kernel that uses
them is only ever compiled after ``registry`` has checked the target.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .codegen import llvm, load, pointer, shuffle, splat
from .registers import BF16, I8, I32, f32x16, u8x64

_BF16X32 = ir.VectorType(BF16, 32)
_BF16X16 = ir.VectorType(BF16, 16)
_I32X16 = ir.VectorType(I32, 16)


@intrinsic
def zero_f32(typingctx):
    """16 zeros."""
    return f32x16(), lambda context, builder, sig, args: ir.Constant(f32x16.ir_type, None)


@intrinsic
def load_f32(typingctx, address):
    """16 floats from a 4-byte-aligned address (``vmovups``)."""

    def codegen(context, builder, sig, args):
        return load(builder, args[0], f32x16.ir_type, 4)

    return f32x16(types.intp), codegen


@intrinsic
def load_bf16(typingctx, address):
    """16 bf16 from a 2-byte-aligned address, as floats (``vpmovzxwd``, ``vpslld``)."""

    def codegen(context, builder, sig, args):
        halves = load(builder, args[0], ir.VectorType(ir.IntType(16), 16), 2)
        words = builder.zext(halves, _I32X16)
        upper = builder.shl(words, ir.Constant(_I32X16, [16] * 16))
        return builder.bitcast(upper, f32x16.ir_type)

    return f32x16(types.intp), codegen


def halves(builder, row):
    """The first and the second bf16 of each pair as floats: a bf16 is the upper half of one."""
    words = builder.bitcast(row, _I32X16)
    first = builder.shl(words, ir.Constant(_I32X16, [16] * 16))
    second = builder.and_(words, ir.Constant(_I32X16, [0xFFFF0000] * 16))
    return [builder.bitcast(x, f32x16.ir_type) for x in (first, second)]


@intrinsic
def first_of_pairs(typingctx, row):
    """16 floats: the first of each pair of bf16 (``vpslld``)."""
    return f32x16(u8x64), lambda context, builder, sig, args: halves(builder, args[0])[0]


@intrinsic
def second_of_pairs(typingctx, row):
    """16 floats: the second of each pair of bf16 (``vpandd``)."""
    return f32x16(u8x64), lambda context, builder, sig, args: halves(builder, args[0])[1]


@intrinsic
def load_f16(typingctx, address):
    """16 IEEE halves from a 2-byte-aligned address, as floats (``vcvtph2ps``)."""

    def codegen(context, builder, sig, args):
        halves = load(builder, args[0], ir.VectorType(ir.HalfType(), 16), 2)
        return builder.fpext(halves, f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def load_u8_as_f32(typingctx, address):
    """16 unsigned bytes, as floats (``vpmovzxbd``, ``vcvtdq2ps``)."""

    def codegen(context, builder, sig, args):
        bytes_ = load(builder, args[0], ir.VectorType(I8, 16), 1)
        return builder.sitofp(builder.zext(bytes_, _I32X16), f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def load_e4m3_halved(typingctx, address):
    """Half of 16 bytes of E4M3, 0 to 448, as floats (``vpmovzxbd``, ``vpslld``, ``vmulps``)."""

    def codegen(context, builder, sig, args):
        bytes_ = builder.zext(load(builder, args[0], ir.VectorType(I8, 16), 1), _I32X16)
        bits = builder.shl(bytes_, ir.Constant(_I32X16, [20] * 16))  # 2**-120 of the value
        power = ir.Constant(f32x16.ir_type, [2.0**119] * 16)
        return builder.fmul(builder.bitcast(bits, f32x16.ir_type), power)

    return f32x16(types.intp), codegen


@intrinsic
def load_i8_as_f32(typingctx, address):
    """16 signed bytes, as floats (``vpmovsxbd``, ``vcvtdq2ps``)."""

    def codegen(context, builder, sig, args):
        bytes_ = load(builder, args[0], ir.VectorType(I8, 16), 1)
        return builder.sitofp(builder.sext(bytes_, _I32X16), f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def store_f32(typingctx, address, value):
    """16 floats to a 4-byte-aligned address (``vmovups``)."""

    def codegen(context, builder, sig, args):
        to = pointer(builder, args[0], f32x16.ir_type)
        builder.store(args[1], to).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen


@intrinsic
def broadcast_f32(typingctx, value):
    """One float in all 16 lanes."""

    def codegen(context, builder, sig, args):
        return splat(builder, args[0], f32x16.ir_type)

    return f32x16(types.float32), codegen


@intrinsic
def broadcast_bf16_pair(typingctx, address):
    """Two bf16 from an address as floats, eight times (``vpbroadcastd``, ``vpsllvd``,
    ``vpandd``)."""

    def codegen(context, builder, sig, args):
        words = splat(builder, load(builder, args[0], I32, 2), _I32X16)
        words = builder.shl(words, ir.Constant(_I32X16, [16, 0] * 8))
        upper = builder.and_(words, ir.Constant(_I32X16, [0xFFFF0000] * 16))
        return builder.bitcast(upper, f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def dot_bf16(typingctx, acc, a, b):
    """``acc[n] + a[2n+1] b[2n+1] + a[2n] b[2n]`` on bf16 pairs (``vdpbf16ps``).

    Subnormal bf16 inputs count as zero, and a subnormal result is flushed (Intel SDM).
    """

    def codegen(context, builder, sig, args):
        a, b = (builder.bitcast(x, _BF16X32) for x in args[1:])
        return llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.ir_type, args[0], a, b)

    return f32x16(f32x16, u8x64, u8x64), codegen


@intrinsic
def sum_f32(typingctx, a):
    """The sum of 16 floats, by halves: (0..7) + (8..15), and so on."""

    def codegen(context, builder, sig, args):
        a = args[0]
        for width in (8, 4, 2, 1):
            low, high = (list(range(i, i + width)) for i in (0, width))
            a = builder.fadd(shuffle(builder, a, a, low), shuffle(builder, a, a, high))
        return builder.extract_element(a, I32(0))

    return types.float32(f32x16), codegen


@intrinsic
def largest_f32(typingctx, a):
    """The largest of 16 floats."""

    def codegen(context, builder, sig, args):
        return llvm(builder, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), args[0])

    return types.float32(f32x16), codegen


@intrinsic
def abs_f32(typingctx, a):
    """``|a|``."""

    def codegen(context, builder, sig, args):
        return llvm(builder, "llvm.fabs.v16f32", f32x16.ir_type, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def add_f32(typingctx, a, b):
    """``a + b`` (``vaddps``)."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fadd(*args)


@intrinsic
def sub_f32(typingctx, a, b):
    """``a - b`` (``vsubps``)."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fsub(*args)


@intrinsic
def add_neighbours(typingctx, a, b):
    """Lanes 0 + 1 and 2 + 3 of each 128-bit lane of a, then of b (two ``vshufps``, ``vaddps``)."""

    def codegen(context, builder, sig, args):
        a, b = args
        even = [lane + src + i for lane in range(0, 16, 4) for src in (0, 16) for i in (0, 2)]
        odd = [lane + 1 for lane in even]
        return builder.fadd(shuffle(builder, a, b, even), shuffle(builder, a, b, odd))

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def even_lanes(typingctx, a, b):
    """Lanes 0, 2, 4 .. of a, then of b (``vpermt2ps``)."""

    def codegen(context, builder, sig, args):
        a, b = args
        return shuffle(builder, a, b, list(range(0, 32, 2)))

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def odd_lanes(typingctx, a, b):
    """Lanes 1, 3, 5 .. of a, then of b (``vpermt2ps``)."""

    def codegen(context, builder, sig, args):
        a, b = args
        return shuffle(builder, a, b, list(range(1, 32, 2)))

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def mul_f32(typingctx, a, b):
    """``a * b`` (``vmulps``)."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fmul(*args)


@intrinsic
def div_f32(typingctx, a, b):
    """``a / b`` (``vdivps``)."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fdiv(*args)


@intrinsic
def fma_f32(typingctx, a, b, c):
    """``a * b + c``, rounded once (``vfmadd``)."""

    def codegen(context, builder, sig, args):
        return llvm(builder, "llvm.fma.v16f32", f32x16.ir_type, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def fnma_f32(typingctx, a, b, c):
    """``c - a * b``, rounded once (``vfnmadd``)."""

    def codegen(context, builder, sig, args):
        a, b, c = args
        return llvm(builder, "llvm.fma.v16f32", f32x16.ir_type, builder.fneg(a), b, c)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def min_f32(typingctx, a, b):
    """``a < b ? a : b`` (``vminps``): ``b`` where either is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def max_f32(typingctx, a, b):
    """``a > b ? a : b`` (``vmaxps``): ``b`` where either is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def round_f32(typingctx, a):
    """Nearest integer, ties to even (``vrndscaleps``)."""

    def codegen(context, builder, sig, args):
        return llvm(builder, "llvm.roundeven.v16f32", f32x16.ir_type, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def scale_exp2_f32(typingctx, a, n):
    """``a * 2**floor(n)`` with correct under- and overflow (``vscalefps``)."""

    def codegen(context, builder, sig, args):
        all_lanes, current_rounding = ir.IntType(16)(-1), I32(4)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        operands = (*args, ir.Constant(f32x16.ir_type, None), all_lanes, current_rounding)
        return llvm(builder, name, f32x16.ir_type, *operands)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def store_bf16(typingctx, address, value):
    """16 floats rounded to nearest-even bf16, to a 2-byte-aligned address (``vcvtneps2bf16``).

    Subnormal floats count as zero (Intel SDM).
    """

    def codegen(context, builder, sig, args):
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        narrow = llvm(builder, name, _BF16X16, args[1])
        to = pointer(builder, args[0], _BF16X16)
        builder.store(narrow, to).align = 2
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen
