"""Ops and passes that are registered from outside: a script, a notebook, another package.

An op of one's own is a row of the op table and a function for each device that is to run it; a pass
of one's own is a function ``Program -> Program`` for ``load_engine(passes=[...])``.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import FunctionType
from typing import Any

from pykernels.errors import PykernelsError

from .devices.cpu.step import BINDERS as CPU_BINDERS
from .devices.ref.ops import OPS as REF_OPS
from .planning.lowerable import Pass
from .program import Program
from .program.op_table.op import Op
from .program.ops import OPS

_registered: set[str] = set()


def register_op(
    name: str,
    row: Op,
    *,
    ref: Callable[..., None] | None = None,
    cpu: Callable[..., list[Any]] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> None:
    """Adds an op to the op table, and what runs it to the devices.

    Registering a name again replaces what was registered before, so that a notebook's cell can be
    run twice; programs that are bound already keep what they have.

    Args:
        name: as nodes have it in ``op``.
        row: its inputs, outputs, weights and attributes (``runtime.program.ops.Port``, ``Attr``).
        ref: ``(memory, node) -> None``, as the functions of ``devices/ref/ops.py``.
        cpu: ``(context, node) -> jobs``, as the binders of ``devices/cpu/expert_ops.py``.
        cuda: ``(memory, node) -> launch``, as the binders of ``devices/cuda/binders``. The device
            without a function refuses programs with that op.

    Raises:
        PykernelsError: an op of that name is there already.
    """
    if name in OPS and name not in _registered:
        raise PykernelsError(f"there is an op {name!r} already", "Give yours another name")
    tables: list[tuple[MutableMapping[str, Any], Any]] = [(REF_OPS, ref), (CPU_BINDERS, cpu)]
    if cuda is not None:
        from .devices.cuda.binders import BINDERS as CUDA_BINDERS

        tables.append((CUDA_BINDERS, cuda))
    OPS[name] = row
    for table, function in tables:
        table.pop(name, None)
        if function is not None:
            table[name] = function
    _registered.add(name)


def checked(rewrite: Pass) -> Pass:
    """The pass, and what it returns checked against the op table.

    The wrapped pass raises PykernelsError, which names the pass, where it returns no program or a
    wrong one.
    """
    name = getattr(rewrite, "__name__", None) or repr(rewrite)

    @functools.wraps(rewrite)
    def check(program: Program) -> Program:
        rewritten = rewrite(program)
        if not isinstance(rewritten, Program):
            raise PykernelsError(
                f"the pass {name} returned {type(rewritten).__name__}, not a program",
                "A pass takes a runtime.program.Program and returns one; it may not change it",
            )
        try:
            return rewritten.check()
        except PykernelsError as error:
            raise PykernelsError(f"after the pass {name}: {error.cause}", error.hint) from None

    return check


def read_pass(text: str) -> Pass:
    """The function of a Python file, as ``FILE:NAME``, or ``FILE`` where it has but one.

    Raises:
        PykernelsError: no such file or function; what the file raises is raised as it is.
    """
    path, _, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    file = Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise PykernelsError(f"there is no Python file {path}", "Give FILE.py or FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses and pickles of the file expect
    spec.loader.exec_module(module)
    passes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == spec.name and key[0] != "_"
    }
    if not name and len(passes) == 1:
        (name,) = passes
    if name not in passes:
        raise PykernelsError(
            f"{file} has no function {name}" if name else f"{file} has {len(passes)} functions",
            f"Give {file}:NAME; it has {', '.join(passes) or 'none'}",
        )
    return passes[name]
