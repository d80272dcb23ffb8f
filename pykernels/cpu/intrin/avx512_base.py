"""Operations of newer AVX-512 extensions, spelled out in AVX-512 F and BW.

For CPUs without AVX512-BF16 (before Cooper Lake and Zen 4), VBMI or GFNI (before Ice Lake) or VNNI
(before Cascade Lake). Each has the name and the meaning of the one instruction in ``avx512``; they
cost two to sixteen, which a stream from memory hides at one or two tokens.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .avx512 import halves
from .codegen import llvm, load, pointer, shuffle, splat
from .registers import I32, I64, f32x16, i32x16, u8x64

_I16X32 = ir.VectorType(ir.IntType(16), 32)
_I32X16 = ir.VectorType(I32, 16)
_I16X16 = ir.VectorType(ir.IntType(16), 16)


def _all(vector, value):
    return ir.Constant(vector, [value] * vector.count)


@intrinsic
def dot_bf16(typingctx, acc, a, b):
    """``acc[n] + a[2n+1] b[2n+1] + a[2n] b[2n]`` on bf16 pairs: two ``vfmadd``, subnormals kept."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        (a_even, a_odd), (b_even, b_odd) = halves(builder, a), halves(builder, b)
        acc = llvm(builder, "llvm.fma.v16f32", f32x16.ir_type, a_odd, b_odd, acc)
        return llvm(builder, "llvm.fma.v16f32", f32x16.ir_type, a_even, b_even, acc)

    return f32x16(f32x16, u8x64, u8x64), codegen


def _high_nibbles(builder, a):
    shifted = builder.lshr(builder.bitcast(a, _I16X32), _all(_I16X32, 4))
    return builder.and_(builder.bitcast(shifted, u8x64.ir_type), _all(u8x64.ir_type, 15))


@intrinsic
def high_nibbles(typingctx, a):
    """``a >> 4`` per byte: a shift and a mask."""

    def codegen(context, builder, sig, args):
        return _high_nibbles(builder, args[0])

    return u8x64(u8x64), codegen


@intrinsic
def high_nibbles_flipped(typingctx, a):
    """``(a >> 4) ^ 8`` per byte: a shift and one ``vpternlog``."""

    def codegen(context, builder, sig, args):
        return builder.xor(_high_nibbles(builder, args[0]), _all(u8x64.ir_type, 8))

    return u8x64(u8x64), codegen


@intrinsic
def set_planes(typingctx, a, address):
    """``a | 16`` and ``| 32`` where bits of two int64 at ``address`` are set: masked moves."""

    def codegen(context, builder, sig, args):
        found, address = args
        for plane in range(2):
            at = builder.add(address, ir.Constant(address.type, 8 * plane))
            mask = builder.bitcast(load(builder, at, I64, 8), ir.VectorType(ir.IntType(1), 64))
            more = builder.or_(found, _all(u8x64.ir_type, 16 << plane))
            found = builder.select(mask, more, found)
        return found

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def dot_u8i8(typingctx, acc, a, b):
    """``acc[n] + sum over 4 of a[4n + i] * b[4n + i]``: ``vpmaddwd``, which does not saturate."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        a, b = (builder.bitcast(x, _I16X32) for x in (a, b))
        eight = _all(_I16X32, 8)
        pairs = (
            (builder.and_(a, _all(_I16X32, 255)), builder.ashr(builder.shl(b, eight), eight)),
            (builder.lshr(a, eight), builder.ashr(b, eight)),
        )
        for left, right in pairs:
            name = "llvm.x86.avx512.pmaddw.d.512"
            acc = builder.add(acc, llvm(builder, name, _I32X16, left, right))
        return acc

    return i32x16(i32x16, u8x64, u8x64), codegen


@intrinsic
def dot_words(typingctx, acc, a, b):
    """``acc[n] + a[2n] * b[2n] + a[2n + 1] * b[2n + 1]`` of signed words: ``vpmaddwd`` and an
    addition."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        a, b = (builder.bitcast(x, _I16X32) for x in (a, b))
        return builder.add(acc, llvm(builder, "llvm.x86.avx512.pmaddw.d.512", _I32X16, a, b))

    return i32x16(i32x16, i32x16, i32x16), codegen


def _lookup(builder, tables, index):
    """``vpshufb`` in every 16-byte part of the tables; the upper bits of the index choose one."""
    parts = []
    for table in tables:
        for part in range(4):
            order = [16 * part + i for _ in range(4) for i in range(16)]
            in_all_lanes = shuffle(builder, table, table, order)
            name = "llvm.x86.avx512.pshuf.b.512"
            low = builder.and_(index, _all(u8x64.ir_type, 15))
            parts.append(llvm(builder, name, u8x64.ir_type, in_all_lanes, low))
    bit = 16
    while len(parts) > 1:
        set_ = builder.icmp_unsigned(
            "!=", builder.and_(index, _all(u8x64.ir_type, bit)), _all(u8x64.ir_type, 0)
        )
        parts = [builder.select(set_, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


@intrinsic
def lookup_128(typingctx, low, high, index):
    """``table[index & 127]`` per byte, the 128-byte table in two registers."""

    def codegen(context, builder, sig, args):
        return _lookup(builder, args[:2], args[2])

    return u8x64(u8x64, u8x64, u8x64), codegen


@intrinsic
def lookup_64(typingctx, table, index):
    """``table[index & 63]`` per byte, the table in one register."""

    def codegen(context, builder, sig, args):
        return _lookup(builder, args[:1], args[1])

    return u8x64(u8x64, u8x64), codegen


def _shifted_words(builder, args, four):
    """``vpshufb`` and a shift to either side, by nothing to one of them."""
    a, shift = args
    order = [8 * j + byte for j in range(8) for byte in four for _ in (0, 1)]
    words = builder.bitcast(shuffle(builder, a, a, order), _I16X32)
    zero = shift.type(0)
    for sign, move in ((1, builder.shl), (-1, builder.lshr)):
        by = builder.mul(shift, shift.type(sign))
        by = builder.select(builder.icmp_signed(">", by, zero), by, zero)
        words = move(words, splat(builder, builder.trunc(by, ir.IntType(16)), _I16X32))
    return builder.bitcast(words, u8x64.ir_type)


@intrinsic
def first_words(typingctx, a, shift):
    """Bytes 0, 1, 4 and 5 of each eight as words, shifted left by ``shift`` (or right: -4 .. 4)."""

    def codegen(context, builder, sig, args):
        return _shifted_words(builder, args, (0, 1, 4, 5))

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def second_words(typingctx, a, shift):
    """The same of bytes 2, 3, 6 and 7."""

    def codegen(context, builder, sig, args):
        return _shifted_words(builder, args, (2, 3, 6, 7))

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def store_bf16(typingctx, address, value):
    """16 floats rounded to nearest-even bf16, to a 2-byte-aligned address; NaN stays NaN."""

    def codegen(context, builder, sig, args):
        address, value = args
        bits = builder.bitcast(value, _I32X16)
        tie = builder.and_(builder.lshr(bits, _all(_I32X16, 16)), _all(_I32X16, 1))
        rounded = builder.add(bits, builder.add(tie, _all(_I32X16, 0x7FFF)))
        nan = builder.fcmp_unordered("uno", value, value)
        quiet = builder.or_(bits, _all(_I32X16, 0x400000))
        upper = builder.lshr(builder.select(nan, quiet, rounded), _all(_I32X16, 16))
        to = pointer(builder, address, _I16X16)
        builder.store(builder.trunc(upper, _I16X16), to).align = 2
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen
