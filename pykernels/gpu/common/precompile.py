"""Launches that compile and do not run: many processes fill Triton's cache on disk before a tuning
run times anything in one."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

import torch
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
