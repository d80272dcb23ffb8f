"""AVX-512 on bytes and integers, one instruction a function. Addresses are plain integers.

See ``avx512``: a kernel that uses these is only compiled after ``registry`` has checked the target.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils, types
from numba.extending import intrinsic

from .codegen import llvm, load, pointer, shuffle, splat
from .registers import I8, I32, I64, f32x16, i32x16, u8x64

_I32X16 = ir.VectorType(I32, 16)


@intrinsic
def load_u8(typingctx, address):
    """64 bytes from a 64-byte-aligned address (``vmovdqa64``)."""

    def codegen(context, builder, sig, args):
        return load(builder, args[0], u8x64.ir_type, 64)

    return u8x64(types.intp), codegen


@intrinsic
def store_u8(typingctx, address, value):
    """64 bytes to a 64-byte-aligned address (``vmovdqa64``)."""

    def codegen(context, builder, sig, args):
        to = pointer(builder, args[0], u8x64.ir_type)
        builder.store(args[1], to).align = 64
        return context.get_dummy_value()

    return types.void(types.intp, u8x64), codegen


@intrinsic
def broadcast_dword(typingctx, address):
    """Four adjacent bytes, two bf16 or four int8, in all 16 dword lanes (``vpbroadcastd m32``)."""

    def codegen(context, builder, sig, args):
        dword = load(builder, args[0], I32, 2)
        return builder.bitcast(splat(builder, dword, _I32X16), u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def broadcast_qword(typingctx, address):
    """Eight adjacent bytes, four bf16, in all 8 qword lanes (``vpbroadcastq m64``)."""

    def codegen(context, builder, sig, args):
        qword = load(builder, args[0], I64, 2)
        return builder.bitcast(splat(builder, qword, ir.VectorType(I64, 8)), u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def broadcast_u8(typingctx, value):
    """One byte in all 64 lanes."""

    def codegen(context, builder, sig, args):
        return splat(builder, builder.trunc(args[0], I8), u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def lookup_128(typingctx, low, high, index):
    """``table[index & 127]`` per byte, the 128-byte table in two registers (``vpermi2b``)."""

    def codegen(context, builder, sig, args):
        low, high, index = args
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return llvm(builder, name, u8x64.ir_type, low, index, high)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def lookup_16(typingctx, table, index):
    """``table[index & 15]`` per byte, each 128-bit lane its own (``vpshufb``)."""

    def codegen(context, builder, sig, args):
        return llvm(builder, "llvm.x86.avx512.pshuf.b.512", u8x64.ir_type, *args)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def lookup_64(typingctx, table, index):
    """``table[index & 63]`` per byte, the table in one register (``vpermb``)."""

    def codegen(context, builder, sig, args):
        table, index = args
        name = "llvm.x86.avx512.permvar.qi.512"
        return llvm(builder, name, u8x64.ir_type, table, index)

    return u8x64(u8x64, u8x64), codegen


_QWORD_PAIRS = [
    [8 * byte for _ in range(8) for byte in four for _ in (0, 1)]
    for four in ((0, 1, 4, 5), (2, 3, 6, 7))
]


def _shifted_words(builder, args, starts):
    """Words whose low bytes are the bits of a qword from ``starts`` less a shift on."""
    a, shift = args
    shifts = splat(builder, builder.trunc(shift, I8), u8x64.ir_type)
    from_bits = builder.sub(ir.Constant(u8x64.ir_type, starts), shifts)
    name = "llvm.x86.avx512.pmultishift.qb.512"
    return llvm(builder, name, u8x64.ir_type, from_bits, a)


@intrinsic
def first_words(typingctx, a, shift):
    """Bytes 0, 1, 4 and 5 of each eight as words, shifted left by ``shift`` (or right: -4 .. 4).

    What lies beyond a byte's own bits means nothing (``vpmultishiftqb``).
    """

    def codegen(context, builder, sig, args):
        return _shifted_words(builder, args, _QWORD_PAIRS[0])

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def second_words(typingctx, a, shift):
    """The same of bytes 2, 3, 6 and 7."""

    def codegen(context, builder, sig, args):
        return _shifted_words(builder, args, _QWORD_PAIRS[1])

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def and_xor_words(typingctx, a, mask, flip):
    """``(a & mask) ^ flip`` of words (``vpternlogd``)."""

    def codegen(context, builder, sig, args):
        words = ir.VectorType(ir.IntType(16), 32)
        mask, flip = (splat(builder, builder.trunc(x, ir.IntType(16)), words) for x in args[1:])
        masked = builder.and_(builder.bitcast(args[0], words), mask)
        return builder.bitcast(builder.xor(masked, flip), u8x64.ir_type)

    return u8x64(u8x64, types.intp, types.intp), codegen


@intrinsic
def xor_u8(typingctx, a, b):
    """``a ^ b``."""
    return u8x64(u8x64, u8x64), lambda context, builder, sig, args: builder.xor(*args)


@intrinsic
def add_u8(typingctx, a, b):
    """``a + b`` per byte (``vpaddb``)."""
    return u8x64(u8x64, u8x64), lambda context, builder, sig, args: builder.add(*args)


@intrinsic
def where_negative(typingctx, sign, a, b):
    """``a`` in each byte where ``sign`` has bit 7 set, else ``b`` (``vpmovb2m``, a masked move)."""

    def codegen(context, builder, sig, args):
        sign, a, b = args
        zeros = ir.Constant(u8x64.ir_type, [0] * 64)
        return builder.select(builder.icmp_signed("<", sign, zeros), a, b)

    return u8x64(u8x64, u8x64, u8x64), codegen


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
        return shuffle(builder, args[0], args[1], order)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def interleave_high(typingctx, a, b):
    """Bytes 8-15 of each 128-bit lane of ``a`` and ``b``, alternating (``vpunpckhbw``)."""

    def codegen(context, builder, sig, args):
        order = [
            lane + i + 64 * src for lane in range(0, 64, 16) for i in range(8, 16) for src in (0, 1)
        ]
        return shuffle(builder, args[0], args[1], order)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def dot_u8i8(typingctx, acc, a, b):
    """``acc[n] + sum over 4 of a[4n + i] * b[4n + i]``, a unsigned, b signed (``vpdpbusd``)."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        # The operands' type was <16 x i32> before LLVM 22 and is <64 x i8> from then on.
        name = "llvm.x86.avx512.vpdpbusd.512"
        if llvm_version_info[0] < 22:
            a, b = (builder.bitcast(x, _I32X16) for x in (a, b))
        return llvm(builder, name, _I32X16, acc, a, b)

    return i32x16(i32x16, u8x64, u8x64), codegen


@intrinsic
def dot_words(typingctx, acc, a, b):
    """``acc[n] + a[2n] * b[2n] + a[2n + 1] * b[2n + 1]`` of signed 16-bit words (``vpdpwssd``)."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        # The operands' type, as of ``dot_u8i8``.
        if llvm_version_info[0] >= 22:
            a, b = (builder.bitcast(x, ir.VectorType(ir.IntType(16), 32)) for x in (a, b))
        return llvm(builder, "llvm.x86.avx512.vpdpwssd.512", _I32X16, acc, a, b)

    return i32x16(i32x16, i32x16, i32x16), codegen


@intrinsic
def zero_i32(typingctx):
    """16 zeros."""
    return i32x16(), lambda context, builder, sig, args: ir.Constant(_I32X16, None)


@intrinsic
def all_i32(typingctx, value):
    """An integer in all 16 lanes."""

    def codegen(context, builder, sig, args):
        return splat(builder, builder.trunc(args[0], I32), _I32X16)

    return i32x16(types.intp), codegen


@intrinsic
def add_i32(typingctx, a, b):
    """``a + b`` (``vpaddd``)."""
    return i32x16(i32x16, i32x16), lambda context, builder, sig, args: builder.add(*args)


@intrinsic
def load_i32(typingctx, address):
    """16 integers from a 4-byte-aligned address."""

    def codegen(context, builder, sig, args):
        return load(builder, args[0], _I32X16, 4)

    return i32x16(types.intp), codegen


@intrinsic
def to_f32(typingctx, a):
    """Integers as floats, to nearest (``vcvtdq2ps``)."""

    def codegen(context, builder, sig, args):
        return builder.sitofp(args[0], f32x16.ir_type)

    return f32x16(i32x16), codegen


@intrinsic
def bits_as_f32(typingctx, a):
    """The floats that have these bits (no instruction)."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], f32x16.ir_type)

    return f32x16(i32x16), codegen


@intrinsic
def to_i32(typingctx, a):
    """Floats as integers, to nearest, ties to even (``vcvtps2dq``)."""

    def codegen(context, builder, sig, args):
        name = "llvm.x86.avx512.mask.cvtps2dq.512"
        zeros, all_lanes, current_rounding = ir.Constant(_I32X16, None), ir.IntType(16)(-1), I32(4)
        return llvm(builder, name, _I32X16, args[0], zeros, all_lanes, current_rounding)

    return i32x16(f32x16), codegen


@intrinsic
def store_low_bytes(typingctx, address, a):
    """The low byte of each of 16 integers, to 16 bytes at any address (``vpmovdb``)."""

    def codegen(context, builder, sig, args):
        address, a = args
        narrow = ir.VectorType(I8, 16)
        to = pointer(builder, address, narrow)
        builder.store(builder.trunc(a, narrow), to).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, i32x16), codegen


@intrinsic
def sum_i32(typingctx, a):
    """The sum of 16 integers."""

    def codegen(context, builder, sig, args):
        return llvm(builder, "llvm.vector.reduce.add.v16i32", I32, args[0])

    return types.int32(i32x16), codegen


@intrinsic
def or_i32(typingctx, a, b):
    """``a | b`` (``vpord``)."""

    def codegen(context, builder, sig, args):
        return builder.or_(*args)

    return i32x16(i32x16, i32x16), codegen


@intrinsic
def low_bytes_i32(typingctx, a):
    """The bits that are set in a low byte of any of 16 integers."""

    def codegen(context, builder, sig, args):
        bits = llvm(builder, "llvm.vector.reduce.or.v16i32", I32, args[0])
        return builder.and_(bits, ir.Constant(I32, 255))

    return types.int32(i32x16), codegen


@intrinsic
def shift_slice(typingctx, a):
    """``(a + 128) >> 8``: what is left above a signed byte."""

    def codegen(context, builder, sig, args):
        more = builder.add(args[0], ir.Constant(_I32X16, [128] * 16))
        return builder.ashr(more, ir.Constant(_I32X16, [8] * 16))

    return i32x16(i32x16), codegen


@intrinsic
def broadcast_i32(typingctx, address):
    """The integer at a 4-byte-aligned address, in all 16 lanes (``vpbroadcastd m32``)."""

    def codegen(context, builder, sig, args):
        return splat(builder, load(builder, args[0], I32, 4), _I32X16)

    return i32x16(types.intp), codegen
