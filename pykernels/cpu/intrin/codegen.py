"""LLVM IR that several intrinsics emit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .registers import I32


def emits(result: types.Type, *operands: types.Type) -> Callable[[Callable], Any]:
    """Decorator: a function that emits an instruction, ``emit(builder, *operands)``, as one that
    kernels call. It gives None where ``result`` is ``types.void``."""

    def decorate(emit: Callable) -> Any:
        def codegen(context, builder, sig, args):
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def definition(typingctx, *args):
            return result(*operands), codegen

        functools.update_wrapper(definition, emit)  # Numba takes the operands' names from it
        return intrinsic(definition)

    return decorate


def llvm(builder, name, result, *operands):
    """Calls the LLVM intrinsic ``name``."""
    fnty = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), operands)


def pointer(builder, address, ir_type):
    """An integer address as a pointer to what is read or written there.

    LLVM's code generator may write such a pointer as an offset from null, in place, before a helper
    is inlined. The optimizer then takes a store there for one to null, which is undefined, and
    drops it. So the function says that null is an address like any other.
    """
    set.add(builder.function.attributes, "null_pointer_is_valid")  # llvmlite does not know it
    return builder.inttoptr(address, ir_type.as_pointer())


def load(builder, address, ir_type, align):
    load = builder.load(pointer(builder, address, ir_type))
    load.align = align
    return load


def splat(builder, scalar, vector):
    undef = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undef, scalar, I32(0))
    return builder.shuffle_vector(one, undef, ir.Constant(ir.VectorType(I32, vector.count), None))


def shuffle(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))
