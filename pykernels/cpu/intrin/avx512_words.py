"""AVX-512 on 16-bit words, one instruction or a few a function. Addresses are plain integers.

See ``avx512``: a kernel that uses these is only compiled after ``registry`` has checked the target.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .codegen import llvm, load, shuffle, splat
from .registers import I8, I32, f32x16, u8x64

_I32X16 = ir.VectorType(I32, 16)
_I16X32 = ir.VectorType(ir.IntType(16), 32)


@intrinsic
def lookup_32_words(typingctx, table, index):
    """``table[index & 31]`` per 16-bit word, the table in one register (``vpermw``)."""

    def codegen(context, builder, sig, args):
        table, index = (builder.bitcast(x, _I16X32) for x in args)
        name = "llvm.x86.avx512.permvar.hi.512"
        return builder.bitcast(llvm(builder, name, _I16X32, table, index), u8x64.ir_type)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def lookup_64_words(typingctx, low, high, index):
    """``table[index & 63]`` per 16-bit word, the table in two registers (``vpermi2w``)."""

    def codegen(context, builder, sig, args):
        low, high, index = (builder.bitcast(x, _I16X32) for x in args)
        name = "llvm.x86.avx512.vpermi2var.hi.512"
        return builder.bitcast(llvm(builder, name, _I16X32, low, index, high), u8x64.ir_type)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def shift_words(typingctx, a, bits):
    """``a >> bits`` of words, unsigned (``vpsrlw``)."""

    def codegen(context, builder, sig, args):
        words = builder.bitcast(args[0], _I16X32)
        by = splat(builder, builder.trunc(args[1], ir.IntType(16)), _I16X32)
        return builder.bitcast(builder.lshr(words, by), u8x64.ir_type)

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def even_words(typingctx, low, high, even):
    """Words of the even bytes of ``low`` and ``high``; ``even`` is 255 in each even byte.

    (``vpsllw``, ``vpternlogd``. Were ``even`` a constant, LLVM would make a ``vpermt2b`` of it,
    three micro-operations of which two want the only port for shuffles.)
    """

    def codegen(context, builder, sig, args):
        low, high, even = (builder.bitcast(x, _I16X32) for x in args)
        upper = builder.shl(high, ir.Constant(_I16X32, [8] * 32))
        return builder.bitcast(builder.or_(builder.and_(low, even), upper), u8x64.ir_type)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def odd_words(typingctx, low, high, even):
    """The same of the odd bytes (``vpsrlw``, ``vpternlogd``)."""

    def codegen(context, builder, sig, args):
        low, high, even = (builder.bitcast(x, _I16X32) for x in args)
        lower = builder.lshr(low, ir.Constant(_I16X32, [8] * 32))
        upper = builder.and_(high, builder.not_(even))
        return builder.bitcast(builder.or_(lower, upper), u8x64.ir_type)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def load_i8_as_word_pairs(typingctx, address):
    """16 signed bytes, each as two adjacent 16-bit words."""

    def codegen(context, builder, sig, args):
        dwords = builder.sext(load(builder, args[0], ir.VectorType(I8, 16), 1), _I32X16)
        low = builder.and_(dwords, ir.Constant(_I32X16, [0xFFFF] * 16))
        high = builder.shl(dwords, ir.Constant(_I32X16, [16] * 16))
        return builder.bitcast(builder.or_(low, high), u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def even_bytes_fma(typingctx, a, b, c):
    """``a * b + c`` of a's even bytes, unsigned, and words b and c, modulo 2**16."""

    def codegen(context, builder, sig, args):
        a, b, c = (builder.bitcast(x, _I16X32) for x in args)
        even = builder.and_(a, ir.Constant(_I16X32, [255] * 32))
        return builder.bitcast(builder.add(builder.mul(even, b), c), u8x64.ir_type)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def odd_bytes_fma(typingctx, a, b, c):
    """The same of a's odd bytes."""

    def codegen(context, builder, sig, args):
        a, b, c = (builder.bitcast(x, _I16X32) for x in args)
        odd = builder.lshr(a, ir.Constant(_I16X32, [8] * 32))
        return builder.bitcast(builder.add(builder.mul(odd, b), c), u8x64.ir_type)

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def upper_bytes(typingctx, even, odd):
    """``a >> 6`` of words, which fits in a byte each, the even and the odd ones alternating."""

    def codegen(context, builder, sig, args):
        six = ir.Constant(_I16X32, [6] * 32)
        words = [builder.ashr(builder.bitcast(x, _I16X32), six) for x in args]
        return _pack_words(builder, *words)

    return u8x64(u8x64, u8x64), codegen


@intrinsic
def lower_bytes(typingctx, even, odd):
    """``(a & 63) - 32`` of words, the even and the odd ones alternating."""

    def codegen(context, builder, sig, args):
        packed = _pack_words(builder, *(builder.bitcast(x, _I16X32) for x in args))
        low = builder.and_(packed, ir.Constant(u8x64.ir_type, [63] * 64))
        return builder.sub(low, ir.Constant(u8x64.ir_type, [32] * 64))

    return u8x64(u8x64, u8x64), codegen


def _pack_words(builder, even, odd):
    low = builder.and_(even, ir.Constant(_I16X32, [255] * 32))
    high = builder.shl(odd, ir.Constant(_I16X32, [8] * 32))
    return builder.bitcast(builder.or_(low, high), u8x64.ir_type)


@intrinsic
def offset_words(typingctx, a, factor):
    """``32 - a * factor`` of words; the factor is a literal or a constant of a factory."""

    def codegen(context, builder, sig, args):
        words = builder.bitcast(args[0], _I16X32)
        factors = splat(builder, builder.trunc(args[1], ir.IntType(16)), _I16X32)
        rest = builder.sub(ir.Constant(_I16X32, [32] * 32), builder.mul(words, factors))
        return builder.bitcast(rest, u8x64.ir_type)

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def mul_words(typingctx, a, factor):
    """``a * factor`` of words."""

    def codegen(context, builder, sig, args):
        words = builder.bitcast(args[0], _I16X32)
        factors = splat(builder, builder.trunc(args[1], ir.IntType(16)), _I16X32)
        return builder.bitcast(builder.mul(words, factors), u8x64.ir_type)

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def low_plane_bf16(typingctx, a):
    """bfloat16 ``-(128 + (a & 127))`` of words: seven bits as they lie are its fraction."""

    def codegen(context, builder, sig, args):
        words = builder.bitcast(args[0], _I16X32)
        fraction = builder.and_(words, ir.Constant(_I16X32, [0x7F] * 32))
        value = builder.or_(fraction, ir.Constant(_I16X32, [0xC300] * 32))
        return builder.bitcast(value, u8x64.ir_type)

    return u8x64(u8x64), codegen


@intrinsic
def load_powers(typingctx, address):
    """16 bfloat16 powers of two, each twice: what they add to another bfloat16 but zero as a word.

    They are taken for 2**-125 if they are less, and for 2**125 if they are more: then a factor of
    0.5 to 7 neither overflows nor is subnormal.
    """

    def codegen(context, builder, sig, args):
        words = ir.VectorType(ir.IntType(16), 16)
        bits = load(builder, args[0], words, 2)
        for order, bound in ((">", 252 << 7), ("<", 2 << 7)):
            limit = ir.Constant(words, [bound] * 16)
            bits = builder.select(builder.icmp_signed(order, bits, limit), limit, bits)
        shift = builder.sub(bits, ir.Constant(words, [127 << 7] * 16))
        dwords = builder.zext(shift, _I32X16)
        upper = builder.shl(dwords, ir.Constant(_I32X16, [16] * 16))
        return builder.bitcast(builder.or_(dwords, upper), u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def bf16_pairs(typingctx, first, second):
    """The upper halves of two registers' floats side by side (``vpsrld``, ``vpternlogd``)."""

    def codegen(context, builder, sig, args):
        first, second = (builder.bitcast(x, _I32X16) for x in args)
        low = builder.lshr(first, ir.Constant(_I32X16, [16] * 16))
        high = builder.and_(second, ir.Constant(_I32X16, [0xFFFF0000] * 16))
        return builder.bitcast(builder.or_(low, high), u8x64.ir_type)

    return u8x64(f32x16, f32x16), codegen


@intrinsic
def load_f32_in_bf16_parts(typingctx, address):
    """8 floats, each as three bfloat16 that add up to it: the 8 upper ones, the next, the lowest; 8
    zeros."""
    floats, dwords = ir.VectorType(ir.FloatType(), 8), ir.VectorType(I32, 8)

    def codegen(context, builder, sig, args):
        rest, parts = load(builder, args[0], floats, 4), []
        for _ in range(3):  # 8 bits of 24 each
            bits = builder.bitcast(rest, dwords)
            upper = builder.and_(bits, ir.Constant(dwords, [0xFFFF0000] * 8))
            parts.append(builder.lshr(upper, ir.Constant(dwords, [16] * 8)))
            rest = builder.fsub(rest, builder.bitcast(upper, floats))
        parts.append(builder.and_(parts[0], ir.Constant(dwords, [0] * 8)))
        first = shuffle(builder, parts[0], parts[1], list(range(16)))
        second = shuffle(builder, parts[2], parts[3], list(range(16)))
        words = builder.trunc(shuffle(builder, first, second, list(range(32))), _I16X32)
        return builder.bitcast(words, u8x64.ir_type)

    return u8x64(types.intp), codegen


@intrinsic
def add_where_nonzero(typingctx, a, b):
    """``a + b`` of words, 0 where a is 0 (``vptestmw``, a masked ``vpaddw``)."""

    def codegen(context, builder, sig, args):
        a, b = (builder.bitcast(x, _I16X32) for x in args)
        zeros = ir.Constant(_I16X32, [0] * 32)
        found = builder.select(builder.icmp_signed("!=", a, zeros), builder.add(a, b), zeros)
        return builder.bitcast(found, u8x64.ir_type)

    return u8x64(u8x64, u8x64), codegen
