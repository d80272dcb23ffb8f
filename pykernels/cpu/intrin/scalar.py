"""Scalar bit patterns."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

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
