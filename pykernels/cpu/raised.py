"""What a routine raises reaches whoever waits for its call.

Numba's own C callbacks print an exception and return 0, which the workers take for done. Here a
routine that raises keeps the exception and returns ``RAISED``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection

from llvmlite import ir
from numba.core import cgutils
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

RAISED = -(1 << 62)
"""What a routine that raises returns: a task's status, then."""

_kept: list[tuple[int, int, BaseException]] = []
"""(thread, when by ``intrin.sync.clock_ns``, what was raised there), in the order of time."""


def keep(kind: type[BaseException], value: object = None) -> None:
    """Called by the routine that raised, with the GIL. Appending is atomic."""
    if not isinstance(value, BaseException):
        arguments = value if isinstance(value, tuple) else () if value is None else (value,)
        value = kind(*arguments)
    _kept.append((threading.get_ident(), time.monotonic_ns(), value))


def anything() -> bool:
    """Whether any thread raised something that nobody has taken yet: a look at a list."""
    return bool(_kept)


def taken(threads: Collection[int | None], since: int = 0) -> BaseException | None:
    """The first that one of these threads raised since then; all of theirs are forgotten."""
    theirs = [kept for kept in list(_kept) if kept[0] in threads]
    for kept in theirs:
        with contextlib.suppress(ValueError):  # another thread has taken it
            _kept.remove(kept)
    return next((error for _, when, error in theirs if when >= since), None)


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
        outer_type = ir.FunctionType(
            context.get_value_type(fndesc.restype),
            [context.get_value_type(argument) for argument in fndesc.argtypes],
        )
        outer = ir.Function(module, outer_type, fndesc.llvm_cfunc_wrapper_name)
        builder = ir.IRBuilder(outer.append_basic_block("entry"))
        status, out = convention.call_function(
            builder, inner, fndesc.restype, fndesc.argtypes, outer.args, attrs=("noinline",)
        )
        with builder.if_then(status.is_error, likely=False):
            _call_keep(context, builder, status)
            builder.ret(ir.Constant(outer_type.return_type, RAISED))
        builder.ret(out)
        self.library.add_ir_module(module)


def _call_keep(context, builder, status) -> None:
    """``keep(*the exception)`` with the GIL held; if even that raises, it is printed."""
    api = context.get_python_api(builder)
    state = api.gil_ensure()
    context.call_conv.raise_error(builder, api, status)
    kind, value, trace = (cgutils.alloca_once_value(builder, api.get_null_object()) for _ in "abc")
    api.err_fetch(kind, value, trace)
    home = api.import_module(context.insert_const_string(builder.module, __name__))
    function = api.object_getattr_string(home, "keep")
    # The value may be NULL, which ends the arguments.
    done = api.call_function_objargs(function, [builder.load(kind), builder.load(value)])
    with builder.if_then(cgutils.is_null(builder, done), likely=False):
        api.err_write_unraisable(function)
    for held in (
        done,
        function,
        home,
        builder.load(kind),
        builder.load(value),
        builder.load(trace),
    ):
        api.decref(held)  # NULL is let be
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
