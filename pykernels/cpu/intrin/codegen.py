"""LLVM IR that several intrinsics emit."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from .registers import I32


def llvm(builder, name, result, *operands):
    """Calls the LLVM intrinsic ``name``."""
    fnty = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), operands)


def load(builder, address, ir_type, align):
    load = builder.load(builder.inttoptr(address, ir_type.as_pointer()))
    load.align = align
    return load


def splat(builder, scalar, vector):
    undef = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undef, scalar, I32(0))
    return builder.shuffle_vector(one, undef, ir.Constant(ir.VectorType(I32, vector.count), None))


def shuffle(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))
