"""Narrow codes in AVX-512: nibbles of bytes, and bits of masks as bits of bytes.

Addresses are plain integers. See ``avx512``: a kernel that uses these is only compiled after
``registry`` has checked the target.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .codegen import llvm, load, shuffle
from .registers import I8, I64, u8x64


@intrinsic
def add_where(typingctx, a, address, more):
    """``a + more`` in each byte j where bit j of the int64 at ``address`` is set.

    ``more`` comes from memory: of a constant sum that carries nothing LLVM makes an "or", and there
    is none with masks of bytes.
    """

    def codegen(context, builder, sig, args):
        a, address, more = args
        word = load(builder, address, I64, 8)
        mask = builder.bitcast(word, ir.VectorType(ir.IntType(1), 64))
        return builder.select(mask, builder.add(a, more), a)

    return u8x64(u8x64, types.intp, u8x64), codegen


@intrinsic
def low_crumbs(typingctx, a):
    """``a & 3`` per byte."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], ir.Constant(u8x64.ir_type, [3] * 64))

    return u8x64(u8x64), codegen


@intrinsic
def low_nibbles(typingctx, a):
    """``a & 15`` per byte."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], ir.Constant(u8x64.ir_type, [15] * 64))

    return u8x64(u8x64), codegen


_HIGH_NIBBLES = [0, 0, 0, 0, 0x80, 0x40, 0x20, 0x10]
"""Rows of a matrix of bits, that of the result's highest bit first."""


def _bits_times(builder, rows, a, flip):
    """``rows @ a ^ flip`` for the bits of each byte: a matrix for each eight bytes."""
    name = "llvm.x86.vgf2p8affineqb.512"
    return llvm(builder, name, u8x64.ir_type, a, rows, ir.Constant(I8, flip))


@intrinsic
def high_nibbles(typingctx, a):
    """``a >> 4`` per byte (``vgf2p8affineqb``)."""

    def codegen(context, builder, sig, args):
        rows = ir.Constant(u8x64.ir_type, 8 * _HIGH_NIBBLES)
        return _bits_times(builder, rows, args[0], 0)

    return u8x64(u8x64), codegen


@intrinsic
def high_nibbles_flipped(typingctx, a):
    """``(a >> 4) ^ 8`` per byte (``vgf2p8affineqb``)."""

    def codegen(context, builder, sig, args):
        rows = ir.Constant(u8x64.ir_type, 8 * _HIGH_NIBBLES)
        return _bits_times(builder, rows, args[0], 8)

    return u8x64(u8x64), codegen


_NO_BYTE = 0x80
_ROWS_OF_PLANES = [
    {5: 8 + qword, 4: qword}.get(bit, _NO_BYTE) for qword in range(8) for bit in reversed(range(8))
]
"""Where in two masks of 64 bits the rows of a matrix for each eight bytes are."""


@intrinsic
def set_planes(typingctx, a, address):
    """``a | 16`` in each byte j where bit j of the int64 at ``address`` is set, ``| 32`` where that
    of the next one is.

    A byte's share of the masks are rows of a matrix (``vpshufb``) that is multiplied with the bit
    of its number (``vgf2p8affineqb``).
    """

    def codegen(context, builder, sig, args):
        a, address = args
        masks = ir.VectorType(I8, 16)
        both = load(builder, address, masks, 8)
        undef = ir.Constant(masks, ir.Undefined)
        everywhere = shuffle(builder, both, undef, 4 * list(range(16)))
        where = ir.Constant(u8x64.ir_type, _ROWS_OF_PLANES)
        rows = llvm(builder, "llvm.x86.avx512.pshuf.b.512", u8x64.ir_type, everywhere, where)
        number = ir.Constant(u8x64.ir_type, 8 * [1 << bit for bit in range(8)])
        return builder.or_(a, _bits_times(builder, rows, number, 0))

    return u8x64(u8x64, types.intp), codegen


@intrinsic
def upper_nibbles(typingctx, a):
    """``a & 0xF0`` per byte."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], ir.Constant(u8x64.ir_type, [0xF0] * 64))

    return u8x64(u8x64), codegen


@intrinsic
def raised_nibbles(typingctx, a):
    """``a << 4`` per byte (``vpsllw`` and a mask)."""

    def codegen(context, builder, sig, args):
        words = ir.VectorType(ir.IntType(16), 32)
        shifted = builder.shl(builder.bitcast(args[0], words), ir.Constant(words, [4] * 32))
        bytes_ = builder.bitcast(shifted, u8x64.ir_type)
        return builder.and_(bytes_, ir.Constant(u8x64.ir_type, [0xF0] * 64))

    return u8x64(u8x64), codegen
