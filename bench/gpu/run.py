"""All ops' cases, one after the other; what ends the GPU's context ends only this process."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch

from bench.peers.catalog import ROOT
from pykernels.errors import PykernelsError

from .harness import Case, Row, measure, measure_all
from .roofs import Roofs, measure_roofs

OPS = ("attention", "moe", "linear", "router", "around")
"""In this order: what a run that ends early should have."""


def module_of(op: str) -> Any:
    """The op's file. Raises `PykernelsError` for an unknown op."""
    if op not in OPS:
        raise PykernelsError(f"There is no op {op!r}", f"Use one of {', '.join(OPS)}")
    return importlib.import_module(f"bench.gpu.{op}")


def one_case(op: str, flags: dict[str, int | str], device: torch.device, seconds: float) -> Row:
    """The row of one case, from its flags.

    Raises:
        PykernelsError: there is no such case.
    """
    check_flags(op, flags)
    return measure(module_of(op).case(device, **flags), device, seconds, measure_roofs(device))


def check_flags(op: str, flags: dict[str, int | str]) -> None:
    """Raises PykernelsError for a flag that the op's one case has not, or a value of another type.

    The flags are the fields of its ``Size`` or the arguments of its ``case``. A count may be 0
    where that is the default.
    """
    module = module_of(op)
    if hasattr(module, "Size"):
        known = {field.name: (field.type, field.default) for field in fields(module.Size)}
    else:
        named = list(inspect.signature(module.case).parameters.values())[1:]  # behind the device
        known = {parameter.name: (parameter.annotation, parameter.default) for parameter in named}
    for name, value in flags.items():
        if name not in known:
            raise PykernelsError(f"{op} has no flag {name!r}", f"Use {', '.join(known)}")
        kind, default = known[name]
        if kind == "int" and (isinstance(value, str) or value < (default != 0)):
            raise PykernelsError(f"{name}={value} is no count", f"Write {name}=1, for example")
        if kind == "str" and not isinstance(value, str):
            example = default if isinstance(default, str) else "bf16"
            raise PykernelsError(
                f"{name}={value} is no name", f"Write {name}={example}, for example"
            )


class Cases:
    """The cases of a run in order: those of a quick run first, then the others.

    Attributes:
        count: cases that have been given, those skipped included.
    """

    def __init__(self, device: torch.device, skip: int, until: float | None) -> None:
        self._device, self._skip, self._until = device, skip, until
        self._before: set[str] = set()
        self.count = 0

    @property
    def over(self) -> bool:
        """Whether the time limit has passed."""
        return self._until is not None and time.monotonic() >= self._until

    def of(self, op: str, few: bool) -> Iterator[Case]:
        """An op's cases; those of the few are not given again. None beyond the time limit."""
        for case in module_of(op).cases(self._device, few):
            key = f"{op} {case.name} {case.params}"
            if few:
                self._before.add(key)
            elif key in self._before:
                del case  # before the next one's tensors are made
                continue
            if self.count >= self._skip and self.over:
                return
            self.count += 1
            if self.count > self._skip:
                yield case
            del case


def rows_of(
    ops: Iterable[str],
    device: torch.device,
    roofs: Roofs,
    seconds: float,
    quick: bool,
    skip: int = 0,
    again: Callable[[int], Iterator[Row]] | None = None,
    until: float | None = None,
) -> Iterator[Row]:
    """Every case's row, none begun after ``until`` (of ``time.monotonic``).

    ``again(n)`` goes on in a new process from case n on.
    """
    cases = Cases(device, skip, until)
    for op, few in [(op, few) for few in ((True,) if quick else (True, False)) for op in ops]:
        if cases.over:
            return
        try:
            yield from measure_all(op, cases.of(op, few), device, seconds, roofs)
        except PykernelsError as error:  # the context is lost
            if again is None:
                raise
            yield {"op": op, "name": "(a new process goes on)", "why": str(error)}
            yield from again(cases.count)
            return  # the new process went through all that is left


def in_a_new_process(
    ops: tuple[str, ...], options: list[str], until: float | None
) -> Callable[[int], Iterator[Row]]:
    """What ``rows_of`` calls: this program again, for what is left."""

    def again(count: int) -> Iterator[Row]:
        command = [sys.executable, "-m", "bench.gpu", "--op", ",".join(ops), "--skip", str(count)]
        command += ["--json", "--no-files", *options]
        if until is not None:
            command += ["--minutes", str(max(0.01, (until - time.monotonic()) / 60))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                row = _row(line)
                if row is None:
                    print(line, end="", file=sys.stderr)
                elif row["op"] != "roofs":
                    yield row
        if child.returncode not in (0, 1):
            yield {
                "op": ops[0],
                "name": "(the new process)",
                "why": f"it ended: {child.returncode}",
            }

    return again


def _row(line: str) -> Row | None:
    """A line of the new process; None for what a library of its printed."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "op" in row else None
