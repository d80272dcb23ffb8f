"""All ops' cases of the GPU, one after the other; what ends its context ends only this process."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from bench.harness.machine import describe_gpu
from bench.harness.timing.case import Case
from bench.harness.timing.measure import measure, measure_all
from bench.harness.timing.roofs import Roofs, measure_roofs
from bench.harness.timing.rows import Row
from pykernels.errors import PykernelsError

OPS = ("attention", "moe", "linear", "router", "delta_net", "small_ops", "unpack_tiles")
"""Ops in the order in which a run times them, so that one that ends early has the first."""

_PLACES = {"delta_net": "step.delta_net", "unpack_tiles": "step.unpack_tiles"}
"""Files of ops that are not named as the op is."""

GoOn = Callable[[int], Iterator[Row]]
"""``go_on(n)``: the rows of a new process, from case n on."""


def module_of(op: str) -> Any:
    """The op's file. Raises `PykernelsError` for an unknown op."""
    if op not in OPS:
        raise PykernelsError(f"There is no op {op!r}", f"Use one of {', '.join(OPS)}")
    return importlib.import_module(f"bench.cases.{_PLACES.get(op, op)}")


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


@dataclass
class GpuRun:
    """Every case of ``ops``, those of a quick run first.

    Attributes:
        part: the ops for the files' name; () if all.
        skip: cases that were timed before.
        minutes: after so many, from ``began`` (``time.monotonic``), no further case is begun;
            0: no limit.
        go_on: what goes on where a case has ended the GPU's context; None: nothing, it raises.
    """

    ops: tuple[str, ...]
    device: torch.device
    roofs: Roofs
    seconds: float
    quick: bool = False
    part: tuple[str, ...] = ()
    skip: int = 0
    minutes: float = 0.0
    began: float = 0.0
    go_on: GoOn | None = None

    def __post_init__(self) -> None:
        self._machine = describe_gpu(self.device)
        passes = [True] if self.quick else [True, False]
        self._passes = [(op, few) for few in passes for op in self.ops]
        self._left = [f"{op}: {'main' if few else 'other'} cases" for op, few in self._passes]

    @property
    def until(self) -> float | None:
        """When the minutes are over."""
        return self.began + 60 * self.minutes if self.minutes else None

    def rows(self) -> Iterator[list[Row]]:
        """Case by case."""
        cases = Cases(self.device, self.skip, self.until)
        for op, few in self._passes:
            if cases.over:
                return
            try:
                given = cases.of(op, few)
                for row in measure_all(op, given, self.device, self.seconds, self.roofs):
                    yield [row]
                if not cases.over:
                    del self._left[0]
            except PykernelsError as error:  # the context is lost
                if self.go_on is None:
                    raise
                yield [{"op": op, "name": "(a new process goes on)", "why": str(error)}]
                for row in self.go_on(cases.count):
                    yield [row]
                if not cases.over:
                    self._left.clear()
                return  # the new process went through all that is left

    def head(self) -> dict[str, Any]:
        """See ``harness.session``."""
        roofs, over = self.roofs, self.until is not None and time.monotonic() >= self.until
        return {
            "machine": self._machine,
            "headline": self._machine["name"],
            "settings": {"ops": self.ops, "seconds": self.seconds, "minutes": self.minutes},
            "roofs": asdict(roofs),
            "quick": self.quick,
            "part": self.part,
            "notes": [
                f"Roofs in this run: read {roofs.read_gbps:.0f} GB/s, copy {roofs.copy_gbps:.0f}"
                f" GB/s (both directions counted), 8192^3 bf16 matmul {roofs.matmul_tflops:.0f}"
                " TFLOP/s (FP8: twice that)."
            ],
            "missing": self._left,
            "why": f"{self.minutes:g} minutes were over" if over else "",
        }
