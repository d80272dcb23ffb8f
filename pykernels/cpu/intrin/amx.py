"""AMX tiles by physical number, one instruction each (Intel SDM volume 2, "TILE" instructions).

A tile is a 1 KiB register of up to 16 rows by 64 bytes. Numbers are literals: they are encoded in
the instruction. A thread must have loaded a configuration (``load_config``), and the process must
have permission for the state, before any of these runs: ``runtime`` sees to both.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .codegen import pointer
from .registers import I8, I64

_VOID = ir.VoidType()


def _call(builder, name, *operands):
    fnty = ir.FunctionType(_VOID, [operand.type for operand in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, fnty, f"llvm.x86.{name}"), operands)


def _number(tile):
    return I8(tile.literal_value)


@intrinsic
def load_config(typingctx, address):
    """Takes the thread's tile shapes from 64 bytes at ``address`` (``ldtilecfg``)."""

    def codegen(context, builder, sig, args):
        _call(builder, "ldtilecfg", pointer(builder, args[0], I8))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def release(typingctx):
    """Gives the thread's tile state back (``tilerelease``)."""

    def codegen(context, builder, sig, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def zero(typingctx, tile):
    """tile = 0 (``tilezero``)."""
    number = _number(tile)

    def codegen(context, builder, sig, args):
        _call(builder, "tilezero", number)
        return context.get_dummy_value()

    return types.void(tile), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, tile, address, stride):
    """Rows of the tile from ``address``, ``stride`` bytes apart (``tileloadd``)."""
    number = _number(tile)

    def codegen(context, builder, sig, args):
        at = pointer(builder, args[1], I8)
        _call(builder, "tileloadd64", number, at, builder.sext(args[2], I64))
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store(typingctx, tile, address, stride):
    """Rows of the tile to ``address``, ``stride`` bytes apart (``tilestored``)."""
    number = _number(tile)

    def codegen(context, builder, sig, args):
        at = pointer(builder, args[1], I8)
        _call(builder, "tilestored64", number, at, builder.sext(args[2], I64))
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def dot_bf16(typingctx, c, a, b):
    """``c[m, n] += sum over pairs of a[m, 2k..] * b[k, n][2]``, bf16 to float32 (``tdpbf16ps``)."""
    numbers = [_number(tile) for tile in (c, a, b)]

    def codegen(context, builder, sig, args):
        _call(builder, "tdpbf16ps", *numbers)
        return context.get_dummy_value()

    return types.void(c, a, b), codegen


@intrinsic(prefer_literal=True)
def dot_i8(typingctx, c, a, b):
    """``c[m, n] += sum over fours of a[m, 4k..] * b[k, n][4]``, int8 to int32 (``tdpbssd``)."""
    numbers = [_number(tile) for tile in (c, a, b)]

    def codegen(context, builder, sig, args):
        _call(builder, "tdpbssd", *numbers)
        return context.get_dummy_value()

    return types.void(c, a, b), codegen
