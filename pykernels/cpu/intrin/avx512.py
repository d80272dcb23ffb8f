"""AVX-512 instructions, one function each. Addresses are plain integers.

Compiling one of these for a CPU that lacks it aborts the process inside LLVM, so a kernel that uses
them is only ever compiled after ``registry`` has checked the target.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils, types
from numba.extending import intrinsic

from .registers import BF16, I8, I32, I64, f32x16, i32x16, u8x64

_BF16X32 = ir.VectorType(BF16, 32)
_BF16X16 = ir.VectorType(BF16, 16)
_I32X16 = ir.VectorType(I32, 16)


def _llvm(builder, name, result, *operands):
    """Calls the LLVM intrinsic ``name``."""
    fnty = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), operands)


def _load(builder, address, ir_type, align):
    load = builder.load(builder.inttoptr(address, ir_type.as_pointer()))
    load.align = align
    return load


def _splat(builder, scalar, vector):
    undef = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undef, scalar, I32(0))
    return builder.shuffle_vector(one, undef, ir.Constant(ir.VectorType(I32, vector.count), None))


def _shuffle(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


# -- moves ---------------------------------------------------------------------------------------


@intrinsic
def zero_f32(typingctx):
    """16 zeros."""
    return f32x16(), lambda context, builder, sig, args: ir.Constant(f32x16.ir_type, None)


@intrinsic
def load_u8(typingctx, address):
    """64 bytes from a 64-byte-aligned address (``vmovdqa64``)."""

    def codegen(context, builder, sig, args):
        return _load(builder, args[0], u8x64.ir_type, 64)

    return u8x64(types.intp), codegen


@intrinsic
def store_u8(typingctx, address, value):
    """64 bytes to a 64-byte-aligned address (``vmovdqa64``)."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], u8x64.ir_type.as_pointer())
        builder.store(args[1], pointer).align = 64
        return context.get_dummy_value()

    return types.void(types.intp, u8x64), codegen


@intrinsic
def load_f32(typingctx, address):
    """16 floats from a 4-byte-aligned address (``vmovups``)."""

    def codegen(context, builder, sig, args):
        return _load(builder, args[0], f32x16.ir_type, 4)

    return f32x16(types.intp), codegen


@intrinsic
def load_bf16(typingctx, address):
    """16 bf16 from a 2-byte-aligned address, as floats (``vpmovzxwd``, ``vpslld``)."""

    def codegen(context, builder, sig, args):
        halves = _load(builder, args[0], ir.VectorType(ir.IntType(16), 16), 2)
        words = builder.zext(halves, _I32X16)
        upper = builder.shl(words, ir.Constant(_I32X16, [16] * 16))
        return builder.bitcast(upper, f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def load_f16(typingctx, address):
    """16 IEEE halves from a 2-byte-aligned address, as floats (``vcvtph2ps``)."""

    def codegen(context, builder, sig, args):
        halves = _load(builder, args[0], ir.VectorType(ir.HalfType(), 16), 2)
        return builder.fpext(halves, f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def load_u8_as_f32(typingctx, address):
    """16 unsigned bytes, as floats (``vpmovzxbd``, ``vcvtdq2ps``)."""

    def codegen(context, builder, sig, args):
        bytes_ = _load(builder, args[0], ir.VectorType(I8, 16), 1)
        return builder.sitofp(builder.zext(bytes_, _I32X16), f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def load_i8_as_f32(typingctx, address):
    """16 signed bytes, as floats (``vpmovsxbd``, ``vcvtdq2ps``)."""

    def codegen(context, builder, sig, args):
        bytes_ = _load(builder, args[0], ir.VectorType(I8, 16), 1)
        return builder.sitofp(builder.sext(bytes_, _I32X16), f32x16.ir_type)

    return f32x16(types.intp), codegen


@intrinsic
def store_f32(typingctx, address, value):
    """16 floats to a 4-byte-aligned address (``vmovups``)."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], f32x16.ir_type.as_pointer())
        builder.store(args[1], pointer).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen


@intrinsic
def broadcast_f32(typingctx, value):
    """One float in all 16 lanes."""

    def codegen(context, builder, sig, args):
        return _splat(builder, args[0], f32x16.ir_type)

    return f32x16(types.float32), codegen


@intrinsic
def broadcast_dword(typingctx, address):
    """Four adjacent bytes, two bf16 or four int8, in all 16 dword lanes (``vpbroadcastd m32``)."""

    def codegen(context, builder, sig, args):
        dword = _load(builder, args[0], I32, 2)
        return builder.bitcast(_splat(builder, dword, _I32X16), u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def broadcast_u8(typingctx, value):
    """One byte in all 64 lanes."""

    def codegen(context, builder, sig, args):
        return _splat(builder, builder.trunc(args[0], I8), u8x64.ir_type)

    return u8x64(types.intp), codegen


# -- bytes ---------------------------------------------------------------------------------------


@intrinsic
def lookup_128(typingctx, low, high, index):
    """``table[index & 127]`` per byte, the 128-byte table in two registers (``vpermi2b``)."""

    def codegen(context, builder, sig, args):
        low, high, index = args
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return _llvm(builder, name, u8x64.ir_type, low, index, high)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def lookup_16(typingctx, table, index):
    """``table[index & 15]`` per byte, each 128-bit lane its own (``vpshufb``)."""

    def codegen(context, builder, sig, args):
        return _llvm(builder, "llvm.x86.avx512.pshuf.b.512", u8x64.ir_type, *args)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def lookup_64(typingctx, table, index):
    """``table[index & 63]`` per byte, the table in one register (``vpermb``)."""

    def codegen(context, builder, sig, args):
        table, index = args
        name = "llvm.x86.avx512.permvar.qi.512"
        return _llvm(builder, name, u8x64.ir_type, table, index)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def set_where(typingctx, a, address, bits):
    """``a | bits`` in each byte j where bit j of the int64 at ``address`` is set (``kmovq``)."""

    def codegen(context, builder, sig, args):
        a, address, bits = args
        word = _load(builder, address, I64, 8)
        mask = builder.bitcast(word, ir.VectorType(ir.IntType(1), 64))
        more = _splat(builder, builder.trunc(bits, I8), u8x64.ir_type)
        return builder.select(mask, builder.or_(a, more), a)

    return u8x64(u8x64, types.intp, types.intp), codegen


@intrinsic
def xor_u8(typingctx, a, b):
    """``a ^ b``."""
    return u8x64(u8x64, u8x64), lambda context, builder, sig, args: builder.xor(*args)


@intrinsic
def sub_i8(typingctx, a, b):
    """``a - b`` per byte (``vpsubb``)."""
    return u8x64(u8x64, u8x64), lambda context, builder, sig, args: builder.sub(*args)


@intrinsic
def abs_i8(typingctx, a):
    """``|a|`` per signed byte (``vpabsb``)."""

    def codegen(context, builder, sig, args):
        poison = ir.Constant(ir.IntType(1), 0)
        fnty = ir.FunctionType(u8x64.ir_type, [u8x64.ir_type, poison.type])
        function = cgutils.get_or_insert_function(builder.module, fnty, "llvm.abs.v64i8")
        return builder.call(function, [args[0], poison])

    return u8x64(u8x64), codegen


@intrinsic
def low_nibbles(typingctx, a):
    """``a & 15`` per byte."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], ir.Constant(u8x64.ir_type, [15] * 64))

    return u8x64(u8x64), codegen


@intrinsic
def high_nibbles(typingctx, a):
    """``a >> 4`` per byte (``vpsrlw`` and a mask)."""

    def codegen(context, builder, sig, args):
        words = ir.VectorType(ir.IntType(16), 32)
        shifted = builder.lshr(builder.bitcast(args[0], words), ir.Constant(words, [4] * 32))
        bytes_ = builder.bitcast(shifted, u8x64.ir_type)
        return builder.and_(bytes_, ir.Constant(u8x64.ir_type, [15] * 64))

    return u8x64(u8x64), codegen


@intrinsic
def even_dwords(typingctx, a, b):
    """Dwords 0 and 2 of each 128-bit lane of a, then of b (``vshufps 0x88``)."""

    def codegen(context, builder, sig, args):
        order = [lane + i + 16 * src for lane in range(0, 16, 4) for src in (0, 1) for i in (0, 2)]
        words = [builder.bitcast(x, _I32X16) for x in args]
        return builder.bitcast(_shuffle(builder, words[0], words[1], order), u8x64.ir_type)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def odd_dwords(typingctx, a, b):
    """Dwords 1 and 3 of each 128-bit lane of a, then of b (``vshufps 0xdd``)."""

    def codegen(context, builder, sig, args):
        order = [lane + i + 16 * src for lane in range(0, 16, 4) for src in (0, 1) for i in (1, 3)]
        words = [builder.bitcast(x, _I32X16) for x in args]
        return builder.bitcast(_shuffle(builder, words[0], words[1], order), u8x64.ir_type)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def or_masked(typingctx, a, b, mask):
    """``a | (b & mask)`` (``vpternlogd``)."""

    def codegen(context, builder, sig, args):
        return builder.or_(args[0], builder.and_(args[1], args[2]))

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def interleave_low(typingctx, a, b):
    """Bytes 0-7 of each 128-bit lane of ``a`` and ``b``, alternating (``vpunpcklbw``)."""

    def codegen(context, builder, sig, args):
        order = [
            lane + i + 64 * src for lane in range(0, 64, 16) for i in range(8) for src in (0, 1)
        ]
        return _shuffle(builder, args[0], args[1], order)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def interleave_high(typingctx, a, b):
    """Bytes 8-15 of each 128-bit lane of ``a`` and ``b``, alternating (``vpunpckhbw``)."""

    def codegen(context, builder, sig, args):
        order = [
            lane + i + 64 * src for lane in range(0, 64, 16) for i in range(8, 16) for src in (0, 1)
        ]
        return _shuffle(builder, args[0], args[1], order)

    return u8x64(u8x64, u8x64), codegen


# -- arithmetic ----------------------------------------------------------------------------------


@intrinsic
def dot_bf16(typingctx, acc, a, b):
    """``acc[n] + a[2n+1] b[2n+1] + a[2n] b[2n]`` on bf16 pairs (``vdpbf16ps``).

    Subnormal bf16 inputs count as zero, and a subnormal result is flushed (Intel SDM).
    """

    def codegen(context, builder, sig, args):
        a, b = (builder.bitcast(x, _BF16X32) for x in args[1:])
        return _llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.ir_type, args[0], a, b)

    return f32x16(f32x16, u8x64, u8x64), codegen


@intrinsic
def dot_u8i8(typingctx, acc, a, b):
    """``acc[n] + sum over 4 of a[4n + i] * b[4n + i]``, a unsigned, b signed (``vpdpbusd``)."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        # The operands' type was <16 x i32> before LLVM 22 and is <64 x i8> from then on.
        name = "llvm.x86.avx512.vpdpbusd.512"
        if llvm_version_info[0] < 22:
            a, b = (builder.bitcast(x, _I32X16) for x in (a, b))
        return _llvm(builder, name, _I32X16, acc, a, b)

    return i32x16(i32x16, u8x64, u8x64), codegen


@intrinsic
def zero_i32(typingctx):
    """16 zeros."""
    return i32x16(), lambda context, builder, sig, args: ir.Constant(_I32X16, None)


@intrinsic
def add_i32(typingctx, a, b):
    """``a + b`` (``vpaddd``)."""
    return i32x16(i32x16, i32x16), lambda context, builder, sig, args: builder.add(*args)


@intrinsic
def load_i32(typingctx, address):
    """16 integers from a 4-byte-aligned address."""

    def codegen(context, builder, sig, args):
        return _load(builder, args[0], _I32X16, 4)

    return i32x16(types.intp), codegen


@intrinsic
def to_f32(typingctx, a):
    """Integers as floats, to nearest (``vcvtdq2ps``)."""

    def codegen(context, builder, sig, args):
        return builder.sitofp(args[0], f32x16.ir_type)

    return f32x16(i32x16), codegen


@intrinsic
def to_i32(typingctx, a):
    """Floats as integers, to nearest, ties to even (``vcvtps2dq``)."""

    def codegen(context, builder, sig, args):
        name = "llvm.x86.avx512.mask.cvtps2dq.512"
        zeros, all_lanes, current_rounding = ir.Constant(_I32X16, None), ir.IntType(16)(-1), I32(4)
        return _llvm(builder, name, _I32X16, args[0], zeros, all_lanes, current_rounding)

    return i32x16(f32x16), codegen


@intrinsic
def store_low_bytes(typingctx, address, a):
    """The low byte of each of 16 integers, to 16 bytes at any address (``vpmovdb``)."""

    def codegen(context, builder, sig, args):
        address, a = args
        narrow = ir.VectorType(I8, 16)
        pointer = builder.inttoptr(address, narrow.as_pointer())
        builder.store(builder.trunc(a, narrow), pointer).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, i32x16), codegen


@intrinsic
def sum_i32(typingctx, a):
    """The sum of 16 integers."""

    def codegen(context, builder, sig, args):
        return _llvm(builder, "llvm.vector.reduce.add.v16i32", I32, args[0])

    return types.int32(i32x16), codegen


@intrinsic
def sum_f32(typingctx, a):
    """The sum of 16 floats, by halves: (0..7) + (8..15), and so on."""

    def codegen(context, builder, sig, args):
        a = args[0]
        for width in (8, 4, 2, 1):
            low, high = (list(range(i, i + width)) for i in (0, width))
            a = builder.fadd(_shuffle(builder, a, a, low), _shuffle(builder, a, a, high))
        return builder.extract_element(a, I32(0))

    return types.float32(f32x16), codegen


@intrinsic
def largest_f32(typingctx, a):
    """The largest of 16 floats."""

    def codegen(context, builder, sig, args):
        return _llvm(builder, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), args[0])

    return types.float32(f32x16), codegen


@intrinsic
def abs_f32(typingctx, a):
    """``|a|``."""

    def codegen(context, builder, sig, args):
        return _llvm(builder, "llvm.fabs.v16f32", f32x16.ir_type, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def add_f32(typingctx, a, b):
    """``a + b`` (``vaddps``)."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fadd(*args)


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
        return _llvm(builder, "llvm.fma.v16f32", f32x16.ir_type, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def fnma_f32(typingctx, a, b, c):
    """``c - a * b``, rounded once (``vfnmadd``)."""

    def codegen(context, builder, sig, args):
        a, b, c = args
        return _llvm(builder, "llvm.fma.v16f32", f32x16.ir_type, builder.fneg(a), b, c)

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
        return _llvm(builder, "llvm.roundeven.v16f32", f32x16.ir_type, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def scale_exp2_f32(typingctx, a, n):
    """``a * 2**floor(n)`` with correct under- and overflow (``vscalefps``)."""

    def codegen(context, builder, sig, args):
        all_lanes, current_rounding = ir.IntType(16)(-1), I32(4)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        operands = (*args, ir.Constant(f32x16.ir_type, None), all_lanes, current_rounding)
        return _llvm(builder, name, f32x16.ir_type, *operands)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def store_bf16(typingctx, address, value):
    """16 floats rounded to nearest-even bf16, to a 2-byte-aligned address (``vcvtneps2bf16``)."""

    def codegen(context, builder, sig, args):
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        narrow = _llvm(builder, name, _BF16X16, args[1])
        pointer = builder.inttoptr(args[0], _BF16X16.as_pointer())
        builder.store(narrow, pointer).align = 2
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen
