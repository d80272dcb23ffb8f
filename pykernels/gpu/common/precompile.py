"""Launches that compile and do not run: threads compile what a program launches side by side, and
many processes fill Triton's cache on disk before a tuning run times anything in one."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

_GPU = __package__.rpartition(".")[0]


@functools.cache
def only_compile(capability: tuple[int, int]) -> None:
    """From now on, launchers of this process take tensors on "meta" for those of a GPU of this
    compute capability, and their launches only compile. There is no way back: use a process of its
    own.

    It needs a CUDA context all the same, which is where Triton learns what to compile for.
    """
    run = JITFunction.run

    def compile_launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kw: Any) -> object:
        return run(self, *args, grid=(1,), warmup=True, **kw)

    JITFunction.run = compile_launch
    package = importlib.import_module(_GPU)
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(package.__path__, f"{_GPU}.")
    ]
    count = torch.cuda.get_device_properties().multi_processor_count
    _replace(importlib.import_module(f"{__package__}.launch"), "supports", lambda device: None)
    for module in modules:
        for name, value in (
            ("device_supports", None),
            ("arch", capability),
            ("num_sms", count),
        ):
            if hasattr(module, name):
                _replace(module, name, functools.partial(_answer, value))


def _answer(value: object, device: torch.device) -> object:
    return value


def _replace(module: Any, name: str, function: object) -> None:
    setattr(module, name, function)


_LOCK = threading.Lock()
_here = threading.local()


def only_compiles() -> bool:
    """Whether launches of this thread do not run."""
    return getattr(_here, "active", False)


@contextmanager
def compiled_together(threads: int) -> Iterator[bool]:
    """Within it launches of this thread do not run: what they launch is compiled, several kernels
    at a time, and is there when it is left. It yields False, and does nothing, where Triton
    compiles one kernel at a time only.

    Raises:
        CompilationError: of the first kernel that cannot be compiled.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or threads < 2:
        yield False
        return
    with _LOCK:
        run = JITFunction.run

        def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kw: Any) -> object:
            return run(self, *args, grid=grid, warmup=warmup or only_compiles(), **kw)

        with ThreadPoolExecutor(threads) as compilers, mode(compilers):
            JITFunction.run, _here.active = launch, True
            try:
                yield True
            finally:
                JITFunction.run, _here.active = run, False
