"""What threads tell each other: atomics, the pause hint, futexes, a clock, a call through a
pointer.

Every control word is an int64 at an 8-byte-aligned address. A futex sees its low half, so those
words count up and only their low 32 bits are compared (little-endian machines only).
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .codegen import pointer
from .registers import I8, I32, I64

_MACHINE = platform.machine()
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE, 202)
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_CLOCK_MONOTONIC = 1


def _word(builder, address):
    return pointer(builder, address, I64)


@intrinsic
def atomic_load(typingctx, address):
    """The word at ``address``; later reads are not moved before it (acquire), nor is it before an
    ``atomic_add`` in front: who says that it sleeps, then looks, misses no wake-up.

    On x86 an acquire alone is the same instruction; on other CPUs the store of an atomic addition
    may still be under way when it reads.
    """

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8, typ=I64)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    """Sets the word; earlier writes are seen by whoever loads it (release)."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Adds to the word and returns what it held before (sequentially consistent)."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx, address, expected, value):
    """Sets the word if it holds ``expected``; returns what it held (sequentially consistent)."""

    def codegen(context, builder, sig, args):
        address, expected, value = args
        pair = builder.cmpxchg(_word(builder, address), expected, value, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tells the core that this is a spin loop (``pause``, ``yield``)."""

    def codegen(context, builder, sig, args):
        void = ir.VoidType()
        if _MACHINE == "x86_64":
            fnty, name, hint = ir.FunctionType(void, []), "llvm.x86.sse2.pause", []
        elif _MACHINE == "aarch64":
            fnty, name, hint = ir.FunctionType(void, [I32]), "llvm.aarch64.hint", [I32(1)]
        else:
            return context.get_dummy_value()
        builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), hint)
        return context.get_dummy_value()

    return types.void(), codegen


def _syscall(builder, *operands):
    """libc's variadic ``syscall``; found by name, so that compiled code can be cached on disk."""
    fnty = ir.FunctionType(I64, [I64], var_arg=True)
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, "syscall"), operands)


@intrinsic
def futex_wait(typingctx, address, seen):
    """Sleeps until woken, unless the word's low half is no longer that of ``seen``."""

    def codegen(context, builder, sig, args):
        address, seen = args
        seen = builder.and_(seen, I64(0xFFFFFFFF))
        zero = I64(0)
        return _syscall(
            builder, I64(_SYS_FUTEX), address, I64(_FUTEX_WAIT_PRIVATE), seen, zero, zero, zero
        )

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def futex_wake_all(typingctx, address):
    """Wakes every thread that sleeps on the word."""

    def codegen(context, builder, sig, args):
        everyone, zero = I64(0x7FFFFFFF), I64(0)
        return _syscall(
            builder, I64(_SYS_FUTEX), args[0], I64(_FUTEX_WAKE_PRIVATE), everyone, zero, zero, zero
        )

    return types.int64(types.intp), codegen


@intrinsic
def clock_ns(typingctx):
    """Monotonic time in ns (``clock_gettime``, which stays in user space)."""

    def codegen(context, builder, sig, args):
        timespec = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        fnty = ir.FunctionType(I32, [I32, timespec.type])
        gettime = cgutils.get_or_insert_function(builder.module, fnty, "clock_gettime")
        builder.call(gettime, [I32(_CLOCK_MONOTONIC), timespec])
        seconds, nanos = (builder.load(builder.gep(timespec, [I32(0), I32(i)])) for i in range(2))
        return builder.add(builder.mul(seconds, I64(1_000_000_000)), nanos)

    return types.int64(), codegen


@intrinsic
def call_task(typingctx, function, args, task, worker):
    """``function(args, task, worker)`` through its address; returns its status."""

    def codegen(context, builder, sig, args):
        fnty = ir.FunctionType(I64, [I64, I64, I64])
        return builder.call(builder.inttoptr(args[0], fnty.as_pointer()), args[1:])

    return types.int64(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def call_routine(typingctx, function, arguments):
    """``function(*arguments)`` through its address, int64s in and out; ``arguments`` is a tuple."""
    count = len(arguments)
    words = types.UniTuple(types.int64, count)  # type: ignore[attr-defined]

    def codegen(context, builder, sig, args):
        values = cgutils.unpack_tuple(builder, args[1], count)
        fnty = ir.FunctionType(I64, [I64] * count)
        return builder.call(builder.inttoptr(args[0], fnty.as_pointer()), values)

    return types.int64(types.intp, words), codegen


@intrinsic
def as_pointer(typingctx, address):
    """An integer address as a ``void*``, for ``numba.carray``."""

    def codegen(context, builder, sig, args):
        return pointer(builder, args[0], I8)

    return types.voidptr(types.intp), codegen
