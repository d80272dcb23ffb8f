"""A machine from a YAML file: units are in the keys, and whatever is wrong is one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pykernels.errors import PykernelsError
from runtime.devices.sim.machine import OTHER, Cpu, Engine, Gpu, Kernel, Machine

_KEYS = {
    each.name: each.type for part in (Machine, Engine, Kernel, Gpu, Cpu) for each in fields(part)
}
for _part in (Machine, Engine, Kernel, Gpu, Cpu):
    _part.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[union-attr]
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that there is not."""


def read_machine(path: Path) -> Machine:
    """Reads a machine's file.

    Raises:
        PykernelsError: no such file, no YAML, or a key or value that is wrong: which, and what it
            should be.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PykernelsError(f"{path}: {error}", "Give the YAML file of a machine") from None
    except yaml.YAMLError as error:
        line = str(error).replace("\n", " ")
        raise PykernelsError(f"{path} is no YAML: {line}", "Correct it") from None
    return parse_machine(data, path)


def parse_machine(data: object, path: Path) -> Machine:
    """A machine from what its file holds.

    Raises:
        PykernelsError: as ``read_machine``.
    """
    if not isinstance(data, dict):
        raise PykernelsError(f"{path} holds no machine", "Write a mapping with name, cpu and gpu")
    try:
        machine = TypeAdapter(Machine).validate_python(data)
    except ValidationError as error:
        raise _mistake(path, error) from None
    for place, value in _numbers(machine):
        last = place.rpartition(".")[2]
        most = 1.0 if last.endswith("_share") else float("inf")
        if not (0 <= value <= most) or (value == 0 and not last.endswith("_us")):
            raise PykernelsError(
                f"{path}: {place} is {value:g}",
                "A share is over 0 and at most 1" if most == 1 else "It must be over 0",
            )
    parts = [("cpu", machine.cpu), ("gpu", machine.gpu)]
    for name, part in parts:
        if part is not None and OTHER not in part.kernels:
            raise PykernelsError(
                f"{path}: {name}.kernels has no {OTHER!r}, by which formats count that it does"
                " not name",
                f"Add {OTHER}: {{tflops: ...}}",
            )
    return machine


def _numbers(part: object, inside: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a machine, with its place."""
    items: list[tuple[str, object]] = []
    if is_dataclass(part):
        items = [(each.name, getattr(part, each.name)) for each in fields(part)]
    elif isinstance(part, dict):
        items = list(part.items())
    for name, value in items:
        place = f"{inside}.{name}" if inside else name
        if isinstance(value, (int, float)):
            yield place, float(value)
        else:
            yield from _numbers(value, place)


def _mistake(path: Path, error: ValidationError) -> PykernelsError:
    """The error of the first mistake in ``path``. An unknown key comes before all others, since it
    is why another one is missing."""
    found = sorted(error.errors(), key=lambda one: one["type"] not in _UNKNOWN)[0]
    place, kind = ".".join(map(str, found["loc"])), found["type"]
    if kind in _UNKNOWN:
        return PykernelsError(f"{path}: {place} is no key of a machine", _near(found["loc"]))
    if kind == "missing":
        return PykernelsError(f"{path}: {place} is missing", "Add it, in the unit that it names")
    reason = found["msg"][:1].lower() + found["msg"][1:]
    return PykernelsError(f"{path}: {place}: {reason}", "Correct the value")


def _near(place: tuple[Any, ...]) -> str:
    """A hint for a key: the one that says the same in the right unit, or a similar one."""
    key = str(place[-1])
    stem = key.partition("_")[0]
    same = [known for known in _KEYS if known.partition("_")[0] == stem]
    near = difflib.get_close_matches(key, same or list(_KEYS), 1, 0.0 if same else 0.5)
    if not near:
        return f"Known are {', '.join(_KEYS)}"
    return f"Its name and unit are {near[0]}"
