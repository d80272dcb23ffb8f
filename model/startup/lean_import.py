"""Imports transformers' modelling code without torch's compiler and its sharding, and quickly.

When modules of transformers are imported, they mark functions for ``torch.compile`` and name
classes of sharded tensors. That alone imports torch's compiler, sympy and FSDP: 2 of the 6 seconds
until a small model is there. Our commands compile nothing by it and shard nothing, so while
transformers is imported those marks do nothing; whatever else is used is imported as ever.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .transformers_index import kept_index

_COMPILER = "torch._dynamo"
_LATE = {
    f"{_COMPILER}._trace_wrapped_higher_order_op": "TransformGetItemToIndex",
    f"{_COMPILER}.utils": "is_compile_supported",
}
"""What is no mark, by its module: imported when it is first called. torch's attention masks enter
the first; torchvision, which transformers imports where it is installed, asks the second."""
_MODULES = (
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
)
"""What the modelling code of every family imports."""


def import_transformers() -> None:
    """Imports it for a command; call this before anything else imports a module of it.

    A version of transformers that uses more of the compiler than is known here imports it: that
    takes longer, and nothing else differs.
    """
    with _without_collection(), kept_index():
        if _COMPILER not in sys.modules:
            try:
                with _without_compiler():
                    _say_that_nothing_is_sharded()
                    _import()
            except (ImportError, AttributeError):
                pass  # below, with the compiler
        _import()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Modules are no garbage: looking for some in them took a fifth of the time of a start."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def _import() -> None:
    for name in _MODULES:
        importlib.import_module(name)


def _say_that_nothing_is_sharded() -> None:
    """transformers asks torch once whether it can shard, and keeps the answer."""
    import torch.distributed
    from transformers.utils import is_torch_distributed_available

    was = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = was


@contextmanager
def _without_compiler() -> Iterator[None]:
    import torch.compiler

    compiler = ModuleType(_COMPILER)
    marks = ("allow_in_graph", "assume_constant_result", "disable")
    compiler.__dict__.update(dict.fromkeys(marks, _unchanged))
    made = {_COMPILER: compiler}
    for module, name in _LATE.items():
        made[module] = ModuleType(module)
        made[module].__dict__[name] = _late(module, name)
    public = {name: getattr(torch.compiler, name) for name in ("disable", "allow_in_graph")}
    for name in public:
        setattr(torch.compiler, name, _unchanged)
    sys.modules.update(made)
    torch.__dict__["_dynamo"] = compiler
    try:
        yield
    finally:
        for name, function in public.items():
            setattr(torch.compiler, name, function)
        for module in made:
            del sys.modules[module]
        del torch.__dict__["_dynamo"]


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return _unchanged if function is None else function


def _late(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **keywords)

    return call
