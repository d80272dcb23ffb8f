"""An exception of a compiled routine reaches the caller that waits for the result.

Numba's own C callbacks print an exception and return 0, which means success to the workers. Here a
routine that raises keeps the exception and returns ``RAISED``.
"""

from __future__ import annotations

from collections import deque
from typing import cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

RAISED = -(1 << 61)
"""What a routine that raises returns; the stages return it too, so that it becomes their task's
status. What calls a routine that is ``linked`` does not look at it and goes on; whoever waits for
the call finds the exception ``pending``."""

_kept: deque[tuple[object, object]] = deque(maxlen=64)
"""(type, value or arguments) of what was raised and nobody has taken. It is filled without running
Python code, where a signal's handler would run too."""


def take() -> BaseException | None:
    """The first that was raised, for who has just seen ``RAISED``; all are forgotten."""
    kept = list(_kept)
    _kept.clear()
    if not kept:
        return None
    kind, value = kept[0]
    if isinstance(value, BaseException):
        return value
    arguments = value if isinstance(value, tuple) else () if value is None else (value,)
    return cast("type[BaseException]", kind)(*arguments)


def pending() -> bool:
    """Whether something was raised that nobody has taken."""
    return bool(_kept)


class _Lower(Lower):
    def create_cfunc_wrapper(self) -> None:
        """The C function around the compiled one, with ``RAISED`` for Numba's 0."""
        context, fndesc = self.context, self.fndesc
        module = context.create_module("routine_wrapper")
        convention = context.call_conv
        inner = ir.Function(
            module,
            convention.get_function_type(fndesc.restype, fndesc.argtypes),
            fndesc.llvm_func_name,
        )
        raised = ir.Constant(ir.IntType(64), RAISED)
        outer_type = ir.FunctionType(
            raised.type,
            [context.get_value_type(argument) for argument in fndesc.argtypes],
        )
        outer = ir.Function(module, outer_type, fndesc.llvm_cfunc_wrapper_name)
        builder = ir.IRBuilder(outer.append_basic_block("entry"))
        status, out = convention.call_function(
            builder, inner, fndesc.restype, fndesc.argtypes, outer.args, attrs=("noinline",)
        )
        with builder.if_then(status.is_error, likely=False):
            _keep(context, builder, status)
            builder.ret(raised)
        # To Numba what does nothing but raise returns None.
        builder.ret(raised if fndesc.restype is types.none else out)
        self.library.add_ir_module(module)


def _keep(context, builder, status) -> None:
    """Appends to ``_kept``, with the GIL held; what goes wrong even there is printed."""
    api = context.get_python_api(builder)
    state = api.gil_ensure()
    context.call_conv.raise_error(builder, api, status)
    kind, value, trace = (cgutils.alloca_once_value(builder, api.get_null_object()) for _ in "abc")
    api.err_fetch(kind, value, trace)
    with builder.if_then(cgutils.is_null(builder, builder.load(value))):
        builder.store(api.make_none(), value)
    what = api.tuple_pack([builder.load(kind), builder.load(value)])
    home = api.import_module(context.insert_const_string(builder.module, __name__))
    kept = api.object_getattr_string(home, "_kept")
    append = api.object_getattr_string(kept, "append")
    done = api.call_function_objargs(append, [what])
    with builder.if_then(cgutils.is_null(builder, done), likely=False):
        api.err_write_unraisable(kept)
    held = [builder.load(slot) for slot in (kind, value, trace)]
    for each in (done, append, kept, home, what, *held):
        api.decref(each)  # NULL is let be
    api.gil_release(state)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    _name = "routine_lowering"

    @property
    def lowering_class(self):
        return _Lower


class RoutineCompiler(CompilerBase):
    """Numba's compiler of C callbacks, with the wrapper from here."""

    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (_Lowering if step is NativeLowering else step, why) for step, why in passes.passes
        ]
        passes.finalize()
        return [passes]
