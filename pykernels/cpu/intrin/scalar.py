"""Bit patterns of single numbers."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from ..jit import inlined
from .registers import F32, I32


@intrinsic
def f32_from_bits(typingctx, bits):
    """The float32 whose bits these are."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_from_f32(typingctx, value):
    """The bits of a float32."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def bf16_as_f32(typingctx, bits):
    """The float32 of a bfloat16's bits: they are its upper half."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)

    return types.float32(types.uint16), codegen


@inlined
def round_bf16(value):
    """float32 -> bf16 bits, to nearest even; NaN stays NaN."""
    bits = bits_from_f32(value)
    if value != value:
        return types.uint16(0x7FC0)
    tie = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + tie) >> types.uint32(16))
