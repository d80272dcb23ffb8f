"""All ops' cases, one after the other; what ends the GPU's context ends only this process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from bench.peers.catalog import ROOT
from pykernels.errors import PykernelsError

from .harness import Row, measure, measure_all, reason
from .roofs import Roofs, measure_roofs

OPS = ("router", "around", "linear", "moe", "attention")
"""In this order, the quick ones first."""


def module_of(op: str) -> Any:
    """The op's file. Raises `PykernelsError` for an unknown op."""
    if op not in OPS:
        raise PykernelsError(f"There is no op {op!r}", f"Use one of {', '.join(OPS)}")
    return importlib.import_module(f"bench.gpu.{op}")


def one_case(op: str, flags: dict[str, int | str], device: torch.device, seconds: float) -> Row:
    """The row of one case, from its flags."""
    return measure(module_of(op).case(device, **flags), device, seconds, measure_roofs(device))


def rows_of(
    ops: Iterable[str],
    device: torch.device,
    roofs: Roofs,
    seconds: float,
    quick: bool,
    skip: int = 0,
    again: Callable[[str, int], Iterator[Row]] | None = None,
) -> Iterator[Row]:
    """Every case's row. ``again(op, n)`` goes on in a new process from the op's case n on."""
    for op in ops:
        count = skip
        try:
            cases = islice(module_of(op).cases(device, quick), skip, None)
            for row in measure_all(op, cases, device, seconds, roofs):
                count += 1
                yield row
        except PykernelsError as error:  # the context is lost
            if again is None:
                raise
            yield {"op": op, "name": "(a new process goes on)", "why": str(error)}
            yield from again(op, count)
            return  # the new process went through all that is left
        except Exception as error:  # the op's file itself
            yield {"op": op, "name": "(all cases)", "why": reason(error)}
        skip = 0


def in_a_new_process(
    ops: tuple[str, ...], options: list[str]
) -> Callable[[str, int], Iterator[Row]]:
    """What ``rows_of`` calls: this program again, for what is left."""

    def again(op: str, count: int) -> Iterator[Row]:
        left = ",".join(ops[ops.index(op) :])
        command = [sys.executable, "-m", "bench.gpu", "--op", left, "--skip", str(count)]
        command += ["--json", "--no-files", *options]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                row = json.loads(line)
                if row["op"] != "roofs":
                    yield row
        if child.returncode not in (0, 1):
            yield {"op": op, "name": "(the new process)", "why": f"it ended: {child.returncode}"}

    return again
