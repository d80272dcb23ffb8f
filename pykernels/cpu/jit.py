"""How a CPU kernel is compiled: one decorator for functions, one for what is called by address.

What was compiled is kept on disk (``cache.files``), by what went into it (``cache.key``).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
from numba.core import config as numba_config
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.registry import CPUDispatcher

from ..env import env
from ..errors import PykernelsError
from .cache.files import cache_of
from .raised import RoutineCompiler

TASK = types.int64(types.intp, types.intp, types.intp)
"""A task: ``status = task(args, index, worker)``. ``args`` is the address of its descriptor,
``index`` counts from 0, ``worker`` is the caller's number below the pool's size. Status 0 means
done."""

_OPTIONS = {"nogil": True, "error_model": "numpy"}
_KERNEL = {"nopython": True, "no_cfunc_wrapper": True}
# No entry for Python either: compiling both entries took a quarter of a kernel's time.
_INLINED = _KERNEL | {"forceinline": True, "no_cpython_wrapper": True}


def _options() -> dict[str, Any]:
    """Numba's options; in the debug mode (``PYKERNELS_DEBUG``) indices are checked.

    Raises:
        PykernelsError: Numba itself is told to compile nothing.
    """
    if numba_config.DISABLE_JIT:
        raise PykernelsError(
            "NUMBA_DISABLE_JIT=1 cannot be used: kernels are made of LLVM's instructions and called"
            " by address",
            "Set PYKERNELS_DEBUG=1 instead: one thread, checked indices, print() and exceptions",
        )
    return _OPTIONS | {"boundscheck": env.debug}


def kernel(variant: str = "", nogil: bool = True) -> Callable[[Callable], Any]:
    """Decorator: a function that is compiled at first call and cached on disk.

    Args:
        variant: what tells apart the kernels that one factory builds, e.g. ``"fp8-m4"``.
        nogil: False: other Python threads wait while it runs, as they should where it takes less
            time than to get the GIL back.
    """

    def decorate(function: Callable) -> Any:
        options = _options() | _KERNEL | {"nogil": nogil}
        dispatcher = _Kernel(_named(function, variant), targetoptions=options)
        dispatcher.variant = variant
        return dispatcher

    return decorate


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts when a kernel is compiled: LLVM calls back into Python, where an exception is
    printed and lost, and the kernel then is not there."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not for it
        return
    came: list[tuple[Any, ...]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for number, frame in came[:1]:
            ours[number](number, frame)


class _Kernel(CPUDispatcher):
    variant: str | None = None
    """Of one that is kept on disk, until it is first compiled: all that it calls is there then."""

    def compile(self, sig: Any) -> Any:
        if self.variant is not None:
            self._cache, self.variant = cache_of(self.py_func, self.variant), None
        with _uninterrupted():
            return super().compile(sig)


def direct(compiled: Any, *arguments: types.Type) -> Any:
    """A ``kernel`` for arguments of these types, without the dispatcher, which looks at the types
    at every call."""
    return compiled.compile(arguments)


class _Inlined(_Kernel):
    """What kernels compile into themselves; called from Python, it is the function in Python."""

    def __call__(self, *args: Any) -> Any:
        return self.py_func(*args)


def inlined(function: Callable) -> Any:
    """Decorator: a helper that LLVM inlines into the kernels that call it (never cached alone)."""
    return _Inlined(function, targetoptions=_options() | _INLINED)


class _Routine(CFunc):
    """Numba's own gives what it has just compiled no environment, though it does so for what it
    loads: a ``print`` then gave up after it had taken the GIL, and kept it for ever."""

    _made: Any = None  # alive: the machine code knows its environment by address

    def _compile_uncached(self) -> Any:
        self._made = super()._compile_uncached()  # type: ignore[misc]
        return self._made

    def compile(self) -> None:
        super().compile()
        if self._made is not None:
            made = self._made
            made.library.codegen.set_env(made.fndesc.env_name, made.environment)


def routine(arguments: int, variant: str = "") -> Callable[[Callable], CFunc]:
    """Decorator: a function of int64s that returns one, compiled now, to be called by ``.address``.

    What calls it (``intrin.sync.call_routine``) knows nothing of its body: so the stages of a layer
    are compiled once, not once for each format whose tiles they call. What it raises is kept for
    whoever waits for the call (``raised``).
    """
    signature = types.int64(*[types.int64] * arguments)

    def decorate(function: Callable) -> CFunc:
        _named(function, variant)
        compiled: Any = _Routine(
            function,
            (signature.args, signature.return_type),
            locals={},
            options=_options(),
            pipeline_class=RoutineCompiler,
        )
        compiled._cache = cache_of(function, variant)
        with _uninterrupted():
            compiled.compile()
        return compiled

    return decorate


_linked: list[CFunc] = []
"""They must live as long as whatever calls them by name."""


def linked(compiled: CFunc) -> Any:
    """A routine as other kernels call it: by name, in their machine code too.

    A ``kernel`` is compiled again with each that calls it; a routine never, so many can share it.
    """
    _linked.append(compiled)
    known: Any = compiled
    symbol = f"{known._pyfunc.__module__}.{known._pyfunc.__qualname__}"
    llvm.add_symbol(symbol, compiled.address)
    return types.ExternalFunction(symbol, known._sig)


def task(variant: str = "") -> Callable[[Callable], CFunc]:
    """Decorator: a task (see ``TASK``), compiled now; ``.address`` is its function pointer."""
    return routine(len(TASK.args), variant)


def _named(function: Callable, variant: str) -> Callable:
    """The function with its variant in its name, and so in the symbol that is linked.

    Numba tells apart the functions of one factory by a number that counts up in each process. Two
    of them that were cached by different processes can have the same one, and the linker would
    take the first for both.
    """
    if variant:
        function.__qualname__ += f"[{variant}]"
    return function
