"""Asking for cache lines ahead of their use. Any address is allowed; every CPU takes the hint."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .codegen import pointer
from .registers import I8, I32


def _prefetch(builder, address, locality):
    at = pointer(builder, address, I8)
    fnty = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, fnty, "llvm.prefetch.p0")
    read, data = I32(0), I32(1)
    builder.call(function, [at, read, I32(locality), data])


@intrinsic
def prefetch_l1(typingctx, address):
    """Prefetches the line at ``address`` to every cache level (``prefetcht0``)."""

    def codegen(context, builder, sig, args):
        _prefetch(builder, args[0], 3)
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def prefetch_l2(typingctx, address):
    """Prefetches the line to the second level and beyond (``prefetcht1``)."""

    def codegen(context, builder, sig, args):
        _prefetch(builder, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def in_order(typingctx):
    """Loads and prefetches before this come before those after it in the machine code.

    It is no instruction: the CPU may still reorder them. LLVM's scheduler takes a prefetch for free
    and moves all those of an unrolled loop to its front, more misses at once than a core can hold.
    """

    def codegen(context, builder, sig, args):
        builder.fence("seq_cst", targetscope="singlethread")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def unknown(typingctx, value):
    """An integer that LLVM takes for any: it unrolls no loop of so many rounds. No instruction."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(args[0].type, [args[0].type])
        return builder.call(ir.InlineAsm(function, "", "=r,0", side_effect=False), args)

    return types.intp(types.intp), codegen
