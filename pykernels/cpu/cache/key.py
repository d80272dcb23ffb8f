"""By what a compiled kernel is known: all that went into it.

These are the files that its own file imports (``sources``), and what a factory or a registry
has handed to it: functions, modules, numbers in its closure and its globals, which the imports
alone do not reach. What it calls by address or symbol is not in it, only how many arguments that
takes. Two folders with the same source have the same keys.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config as numba_config
from numba.core import types

from ...target import detect
from . import sources

_SIMPLE = type(None), bool, int, float, complex, str, bytes
_COMPILER = tuple(str(Path(__file__).parents[1] / name) for name in ("jit.py", "raised.py"))


def key_of(function: Callable, variant: str) -> str | None:
    """The key of a kernel's function; None if it must not be kept.

    That is where something in it has no file, a notebook's cell for example, or has a file that
    changed after this process began: what it was made of can then not be told.
    """
    seen = _Seen()
    try:
        seen.add(function)
        files = sorted(seen.files | set(_COMPILER))
        if not seen.known or any(map(sources.is_newer, _COMPILER)):
            return None
        if any(map(sources.changed, files)):
            return None
        texts = sorted((sources.source(file).name, sources.digest(file)) for file in files)
    except (OSError, SyntaxError, ValueError):  # a file is gone, or half written
        return None
    sources.keep()
    return _digest(_versions(), variant, function.__qualname__, texts, seen.values)


def key_of_modules(*files: Path) -> str:
    """The key of whatever a few modules compile on this CPU."""
    texts = sorted(sources.digest(str(file)) for file in files)
    sources.keep()
    return _digest(_versions(), texts)


def _versions() -> tuple[object, ...]:
    return (
        sys.version_info[:2],
        numba.__version__,
        llvmlite.__version__,
        np.__version__,
        numba_config.CPU_NAME,
        numba_config.CPU_FEATURES,
        numba_config.OPT,
        detect().cpu,
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


class _Seen:
    """Collects the source files and values that a function reaches.

    Attributes:
        files: of the functions and modules.
        values: the others, in the order in which they are met.
        known: whether all functions have files.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.values: list[object] = []
        self.known = True
        self._met: dict[int, object] = {}  # alive, so that no other gets its id

    def add(self, value: Any) -> None:
        """Adds a value and what it holds."""
        if isinstance(value, _SIMPLE):
            self.values.append(value)
            return
        if id(value) in self._met:
            return
        self._met[id(value)] = value
        if isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, ModuleType):
            self._add_file(getattr(value, "__file__", None), value.__name__)
        elif isinstance(value, types.ExternalFunction):
            self.values.append((value.symbol, str(value.sig)))
        elif isinstance(value, np.ndarray | np.generic):
            self.values.append((str(value.dtype), value.shape, value.tobytes()))
        elif isinstance(value, type):
            self.values.append(f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, tuple | list):
            self._add_all(value)
        elif isinstance(value, set | frozenset):
            self._add_all(sorted(value, key=repr))
        elif isinstance(value, Mapping):
            self._add_all(part for item in value.items() for part in item)
        else:
            self._add_object(value)

    def _add_all(self, values: Iterator[Any] | Any) -> None:
        for value in values:
            self.add(value)

    def _add_object(self, value: Any) -> None:
        """What Numba compiled or will, a partial function, a record of these, or another thing."""
        for attribute in ("py_func", "_pyfunc", "_defn"):  # dispatcher, routine, intrinsic
            if isinstance(function := getattr(value, attribute, None), FunctionType):
                self.add(function)
                return
        kind = type(value)
        self.values.append(f"{kind.__module__}.{kind.__qualname__}")
        if isinstance(value, functools.partial):
            self._add_all((value.func, value.args, value.keywords))
        elif dataclasses.is_dataclass(value):
            self._add_all(getattr(value, field.name) for field in dataclasses.fields(value))
        elif isinstance(value, types.Type | np.dtype):
            self.values.append(str(value))

    def _add_function(self, function: FunctionType) -> None:
        file = function.__code__.co_filename
        self.values.append(function.__qualname__)
        if not self._add_file(file, file):
            self.known = self.known and (file.startswith("<frozen") or os.path.isfile(file))
            return
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not set yet: the function itself, most often
                continue
        for name in _names(function.__code__):
            if name in function.__globals__:
                self.add(function.__globals__[name])

    def _add_file(self, file: str | None, name: str) -> bool:
        """Whether it is a file of the project, which is added then; else its name is."""
        if file and sources.of_project(absolute := os.path.abspath(file)):
            self.files.add(absolute)
            return True
        self.values.append(os.path.basename(name))
        return False


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code and the code inside it look up."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return (*code.co_names, *(name for part in inner for name in _names(part)))
