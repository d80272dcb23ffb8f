"""How a CPU kernel is compiled: one decorator for functions, one for what is called by address.

Numba's own disk cache does not see a change in another file (an intrinsic's, say), and it never
hits for kernels that a factory builds, since compiled functions in a closure have no stable hash.
So the cache folder is keyed by a hash of ``SOURCES``, the versions and the CPU, and inside it a
kernel is known by its name and its ``variant``. A folder that nobody used for a month is deleted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config as numba_config
from numba.core import types
from numba.core.caching import FunctionCache, NullCache, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.registry import CPUDispatcher

from ..env import env
from ..errors import PykernelsError
from ..target import detect
from .raised import RoutineCompiler

TASK = types.int64(types.intp, types.intp, types.intp)
"""A task: ``status = task(args, index, worker)``. ``args`` is the address of its descriptor,
``index`` counts from 0, ``worker`` is the caller's number below the pool's size. Status 0 means
done."""

SOURCES = (
    "pykernels/cpu",
    "pykernels/quant",
    "pykernels/ref/sampling/__init__.py",
    "runtime/workers/fence.py",
    "runtime/workers/reduce.py",
    "runtime/workers/ring.py",
    "runtime/workers/spans.py",
    "runtime/workers/moe_job.py",
)
"""All source that compiled code is made of: an edit elsewhere recompiles nothing."""

MONTH = 30 * 24 * 3600.0

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_KERNEL = {"nopython": True, "no_cfunc_wrapper": True}
# No entry for Python either: compiling both entries took a quarter of a kernel's time.
_INLINED = _KERNEL | {"forceinline": True, "no_cpython_wrapper": True}


def kernel(variant: str = "", nogil: bool = True) -> Callable[[Callable], Any]:
    """Decorator: a function that is compiled at first call and cached on disk.

    Args:
        variant: what tells apart the kernels that one factory builds, e.g. ``"fp8-m4"``.
        nogil: False: other Python threads wait while it runs, as they should where it takes less
            time than to get the GIL back.
    """

    def decorate(function: Callable) -> Any:
        options = _OPTIONS | _KERNEL | {"nogil": nogil}
        dispatcher = _Kernel(_named(function, variant), targetoptions=options)
        dispatcher._cache = _cache(function, variant)
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
    def compile(self, sig: Any) -> Any:
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
    return _Inlined(function, targetoptions=_OPTIONS | _INLINED)


def routine(arguments: int, variant: str = "") -> Callable[[Callable], CFunc]:
    """Decorator: a function of int64s that returns one, compiled now, to be called by ``.address``.

    What calls it (``intrin.sync.call_routine``) knows nothing of its body: so the stages of a layer
    are compiled once, not once for each format whose tiles they call. What it raises is kept for
    whoever waits for the call (``raised``).
    """
    signature = types.int64(*[types.int64] * arguments)

    def decorate(function: Callable) -> CFunc:
        _named(function, variant)
        compiled: Any = CFunc(
            function,
            (signature.args, signature.return_type),
            locals={},
            options=dict(_OPTIONS),
            pipeline_class=RoutineCompiler,
        )
        compiled._cache = _cache(function, variant)
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


class _Locator(UserProvidedCacheLocator):
    """``cache_folder``, whether it can be written or not. Numba's own locators would fall back to
    folders that stay valid when another file changes, and read a setting of the process, which
    threads that compile at once would change for each other."""

    def __init__(self, function, file):
        self._py_file, self._lineno = file, function.__code__.co_firstlineno
        self._cache_path = str(cache_folder() / self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function, file):
        return cls(function, file)


class _Files(FunctionCache._impl_class):
    _locator_classes = [_Locator]


class _KernelCache(FunctionCache):
    """Numba's function cache with an index that says what was compiled, not how it hashes."""

    _impl_class = _Files

    def __init__(self, function: Callable, variant: str) -> None:
        self._variant = variant
        super().__init__(function)

    def _index_key(self, sig, codegen):
        return sig, codegen.magic_tuple(), self._variant

    def load_overload(self, sig, target_context):
        """Loads what is cached; a damaged file counts as none: it is compiled and written again."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling half a file raises anything
            with contextlib.suppress(OSError):  # ``save_overload`` will tell
                self.flush()
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            raise PykernelsError(
                f"compiled kernels cannot be kept in {self.cache_path}: {error.strerror}",
                "Free some space, or point PYKERNELS_CACHE_DIR at a folder that you may write to",
            ) from None


def _cache(function: Callable, variant: str) -> Any:
    """The cache of a function in a file. A notebook's is compiled anew in each process: nothing
    tells when the cell has changed."""
    in_file = Path(function.__code__.co_filename).is_file()
    return _KernelCache(function, variant) if in_file else NullCache()


def cache_folder() -> Path:
    """Where this version of the kernels is cached for this CPU; made if it is not there.

    Raises:
        PykernelsError: the folder cannot be made or written.
    """
    folder = env.cache_dir / _fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PykernelsError(
            f"the folder for compiled kernels, {folder}, cannot be made: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may write to",
        ) from None
    _forget_unused(folder)
    return folder


@functools.cache  # once a process
def _forget_unused(folder: Path) -> None:
    """Marks this folder as used; deletes those of other versions that nobody used for a month."""
    with contextlib.suppress(OSError):  # of another user, or deleted by another process just now
        os.utime(folder)
        for other in folder.parent.iterdir():
            old = time.time() - other.stat().st_mtime > MONTH
            if old and re.fullmatch("[0-9a-f]{16}", other.name) and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent.parent
    for source in SOURCES:
        files = sorted((root / source).rglob("*.py")) or [root / source]
        for file in files:
            digest.update(file.read_bytes())
    versions = (
        numba.__version__,
        llvmlite.__version__,
        numba_config.CPU_NAME,
        numba_config.CPU_FEATURES,
    )
    digest.update(repr((versions, detect().cpu)).encode())
    return digest.hexdigest()[:16]
