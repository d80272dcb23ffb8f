"""Triton's interpreter without what it does in vain: three quarters of its time.

At each call of each function it looks through all of Triton's language for what it must patch. It
finds out for each integer operation whether it overflows, for an assertion that it then leaves out.
It makes the type of each value anew, with its name, and a constant of each number. It takes floats
apart to make bfloat16 of them. What is computed stays the same, to the bit; only numbers below
1e-38, which that took for others, are right.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


@functools.cache  # once a process
def quicken() -> None:
    """Leaves that out, for all launches to come."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # else somebody sees the assertions
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_once()
    _keep_types()
    _keep_constants()
    _check_operands_once()
    _shift_to_bfloat16()


def _patch_once() -> None:
    """What a launch patches is looked for once a process, and patched once a launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    look, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    sees = [SimpleNamespace(__globals__={"tl": module}) for module in (tl, tl.core)]
    scopes = [look(function) for function in sees]
    changes: dict[Any, tuple[object, str, Any, Any]] = {}  # what it becomes, and was before
    for owner, name, before in scopes[0]._changes + scopes[1]._changes:
        now = _quick(inspect.getattr_static(owner, name))
        changes.setdefault((id(owner), name), (owner, name, now, before))
    for scope in reversed(scopes):
        scope.restore()
    nothing = interpreter._LangPatchScope()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        """What is patched stays so until a launch ends."""
        scope = interpreter._LangPatchScope()
        for owner, name, now, before in changes.values():
            scope._changes.append((owner, name, before))
            setattr(owner, name, now)
        try:
            launch(self, *args, **kwargs)
        finally:
            scope.restore()

    interpreter._patch_lang = lambda function: nothing
    interpreter.GridExecutor.__call__ = launched


def _quick(patched: Any) -> Any:
    """A function of the language, called without two wrappers around it."""
    from triton.runtime import interpreter

    member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    if member is None:
        return patched
    if member.__code__.co_qualname == "builtin.<locals>.wrapper":
        member = member.__wrapped__
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return call


def _keep_types() -> None:
    """One type of a block for the same elements and shape, and one shape of all its tensors."""
    import triton.language as tl
    from triton.runtime import interpreter

    core, block_type, tensor = tl.core, tl.block_type, tl.tensor
    numpy_of = interpreter._get_np_dtype
    fill_type, fill_tensor, unwrap = (
        block_type.__init__,
        tensor.__init__,
        core._unwrap_if_constexpr,
    )
    types: dict[Any, dict[str, Any]] = {}
    blocks: dict[Any, Any] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    known: dict[str, Any] = {}
    containers = (list, tuple, core.tuple)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, containers) else value

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is core.constexpr else s for s in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        found = types.get(key)
        if found is None:
            fill_type(self, element_ty, shape)
            self.shape = blocks.setdefault(sizes, self.shape)
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    def new_tensor(self: Any, handle: Any, kind: Any) -> None:
        if type(kind) is not block_type:
            sizes: Any = ()
        else:
            sizes = tuple(kind.shape.values)
        if sizes not in shapes:
            fill_tensor(self, handle, kind)
            shapes[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[sizes]

    def known_numpy_of(kind: Any) -> Any:
        """By the name of its scalars, without a table of all types for each question."""
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_of(scalar)
        return known[scalar.name]

    to_ir = block_type.to_ir
    builder = interpreter.interpreter_builder
    block_type.to_ir = lambda self, to: self if to is builder else to_ir(self, to)
    core._unwrap_if_constexpr = unwrapped
    block_type.__init__ = new_type
    tensor.__init__ = new_tensor
    interpreter._get_np_dtype = known_numpy_of


def _keep_constants() -> None:
    """One tensor for the same number and type, or the same range: nothing writes into a value."""
    from triton.runtime import interpreter

    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    make, make_range = semantic.scalar_constant, builder.create_make_range
    constants: dict[Any, Any] = {}

    def scalar_constant(value: Any, dtype: Any) -> Any:
        key = (*_number(value), getattr(dtype, "name", None))
        if key not in constants:
            _bound(constants)[key] = make(value, dtype)
        return constants[key]

    @functools.cache
    def create_range(start: int, stop: int) -> Any:
        return make_range(None, start, stop)

    semantic.scalar_constant = scalar_constant
    builder.create_make_range = lambda kind, start, stop: create_range(start, stop)


def _number(value: Any) -> tuple[Any, ...]:
    """What tells a number from all others: 1 from 1.0 and True, 0.0 from -0.0."""
    return type(value), value, math.copysign(1, value) if type(value) is float else 0


def _bound(kept: dict[Any, Any]) -> dict[Any, Any]:
    """The same table, emptied where it has grown large."""
    if len(kept) > 4000:
        kept.clear()
    return kept


def _check_operands_once() -> None:
    """Operands of one type need no conversion; a number becomes the same block beside the same."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    semantic, handle = interpreter.interpreter_semantic, interpreter.TensorHandle
    check: Callable[..., Any] = semantic.binary_op_type_checking_impl
    slowly: Callable[..., Any] = semantic.broadcast_impl_value
    tensor, block_type = tl.tensor, tl.block_type
    alike = {"int1", "int32", "int64", "uint32", "fp32"}
    blocks: dict[Any, Any] = {}

    def checked(lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor:
            if lhs.dtype.name in alike and lhs.dtype.name == rhs.dtype.name:
                return broadcast(lhs, rhs)
        elif type(lhs) is tensor and type(rhs) in (int, float) and lhs.type.is_block():
            kind = lhs.dtype.name, getattr(lhs.dtype, "address_space", None), *lhs.type.shape.values
            key = (kind, _number(rhs), flags, *named.items())
            if key not in blocks:
                left, right = check(lhs, rhs, *flags, **named)
                if left is not lhs or right.handle.data.size > 4096:
                    return left, right
                _bound(blocks)[key] = right
            return lhs, blocks[key]
        return check(lhs, rhs, *flags, **named)

    def grown(value: Any, sizes: list[int]) -> Any:
        data = np.broadcast_to(value.handle.data, sizes)
        kind = block_type(value.dtype, sizes)
        return tensor(handle(data, value.handle.dtype.scalar), kind)

    def broadcast(lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if type(a) is not block_type or type(b) is not block_type:
            return (lhs, rhs) if type(a) is type(b) else slowly(lhs, rhs)
        if a.shape is b.shape:
            return lhs, rhs
        left, right = a.shape.values, b.shape.values
        pairs = list(zip(left, right, strict=False))
        if len(left) != len(right) or any(m != n and 1 not in (m, n) for m, n in pairs):
            return slowly(lhs, rhs)
        sizes = [max(pair) for pair in pairs]
        lhs = lhs if left == sizes else grown(lhs, sizes)
        return lhs, rhs if right == sizes else grown(rhs, sizes)

    semantic.binary_op_type_checking_impl = checked
    semantic.broadcast_impl_value = broadcast


def _shift_to_bfloat16() -> None:
    """Between float32 and bfloat16: the upper half of the bits, which is cut off as before."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl
    handle, float32, bfloat16 = interpreter.TensorHandle, tl.float32, tl.bfloat16

    def shifted(self: Any, src: Any, dst_type: Any) -> Any:
        before, after = src.dtype.scalar, dst_type.scalar
        if before == bfloat16 and after == float32:
            bits = src.data.view(np.uint16).astype(np.uint32)
            return handle((bits << 16).view(np.float32), after)
        if before == float32 and after == bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32) >> 16
            return handle(bits.astype(np.uint16), after)
        return cast(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = shifted
