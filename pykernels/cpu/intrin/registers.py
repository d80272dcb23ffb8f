"""SIMD registers as Numba types, and arrays of them that LLVM keeps in registers.

``acc = f32x16_array(8)`` is eight accumulators that a kernel indexes like a list. They begin as a
stack slot; with a constant trip count LLVM unrolls the loops over them, and scalar replacement
turns each element into one register. ``tests/cpu/test_tiles.py`` checks that none is left on the
stack.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel.models import PointerModel, PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()


class BFloatType(ir.types.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    null = "0.0"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


BF16 = BFloatType()


class Register(types.Type):
    """One SIMD register seen as a vector of a given element."""

    def __init__(self, name: str, ir_type: ir.Type) -> None:
        self.ir_type = ir_type
        super().__init__(name)


@register_model(Register)
class RegisterModel(PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, fe_type.ir_type)


f32x16 = Register("f32x16", ir.VectorType(F32, 16))
i32x16 = Register("i32x16", ir.VectorType(I32, 16))
f32x8 = Register("f32x8", ir.VectorType(F32, 8))
i32x8 = Register("i32x8", ir.VectorType(I32, 8))
u8x64 = Register("u8x64", ir.VectorType(I8, 64))


class RegisterArray(types.Type):
    """Registers of one kind; indices must be constant once loops unroll.

    How many is not part of the type: so functions that take an array are compiled once for all
    lengths.
    """

    def __init__(self, element: Register) -> None:
        self.element = element
        super().__init__(f"{element.name}[]")


@register_model(RegisterArray)
class RegisterArrayModel(PointerModel):
    def __init__(self, dmm, fe_type) -> None:
        PrimitiveModel.__init__(self, dmm, fe_type, fe_type.element.ir_type.as_pointer())


def _array_of(element: Register, length: Any):
    def codegen(context, builder, sig, args):
        array = ir.ArrayType(element.ir_type, length.literal_value)
        slot = cgutils.alloca_once(builder, array)
        return builder.gep(slot, [I64(0), I64(0)], inbounds=True)

    return RegisterArray(element)(length), codegen


@intrinsic(prefer_literal=True)
def f32x16_array(typingctx, length):
    """``length`` registers of 16 floats; ``length`` is a literal or a factory's constant."""
    return _array_of(f32x16, length)


@intrinsic(prefer_literal=True)
def i32x16_array(typingctx, length):
    """``length`` registers of 16 integers; ``length`` as above."""
    return _array_of(i32x16, length)


@intrinsic(prefer_literal=True)
def f32x8_array(typingctx, length):
    """``length`` registers of 8 floats; ``length`` as above."""
    return _array_of(f32x8, length)


@intrinsic(prefer_literal=True)
def i32x8_array(typingctx, length):
    """``length`` registers of 8 integers; ``length`` as above."""
    return _array_of(i32x8, length)


@infer_global(operator.getitem)
class _TypeOfGet(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 2 and isinstance(args[0], RegisterArray):
            return signature(args[0].element, args[0], types.intp)


@infer_global(operator.setitem)
class _TypeOfSet(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 3 and isinstance(args[0], RegisterArray):
            return signature(types.none, args[0], types.intp, args[0].element)


def _slot(builder, array, index):
    return builder.gep(array, [index], inbounds=True)


@lower_builtin(operator.getitem, RegisterArray, types.intp)
def _lower_get(context, builder, sig, args):
    return builder.load(_slot(builder, *args))


@lower_builtin(operator.setitem, RegisterArray, types.intp, Register)
def _lower_set(context, builder, sig, args):
    builder.store(args[2], _slot(builder, args[0], args[1]))
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)
def stack_alloc(typingctx, nbytes):
    """Address of ``nbytes`` (a literal) of this call's stack, 64-byte aligned, not cleared."""
    size = nbytes.literal_value

    def codegen(context, builder, sig, args):
        # Not ``alloca_once``, which stores zeros: LLVM takes seconds to split so large a store.
        with builder.goto_entry_block():
            slot = builder.alloca(ir.ArrayType(I8, size))
        slot.align = 64
        return builder.ptrtoint(slot, I64)

    return types.intp(nbytes), codegen


def _pin(context, builder, sig, args):
    function = ir.FunctionType(args[0].type, [args[0].type])
    asm = ir.InlineAsm(function, "", "=x,0", side_effect=True)
    # It touches no memory: what was loaded before it need not be loaded again.
    return builder.call(asm, args, attrs=("nounwind", "readnone"))


@intrinsic
def pin_f32(typingctx, a):
    """The value, computed before anything that follows: no instruction.

    LLVM hoists the loads of an unrolled loop and spills what they bring; a kernel that pins its
    accumulators row by row keeps them in registers.
    """
    return f32x8(f32x8), _pin


@intrinsic
def pin_i32(typingctx, a):
    """The same of integers."""
    return i32x8(i32x8), _pin
