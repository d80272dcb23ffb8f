"""A machine from a YAML file: units are in the keys, and whatever is wrong is one line."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pykernels.errors import PykernelsError

from .machine import OTHER, Cpu, Engine, Gpu, Kernel, Machine

_KEYS = {
    key: f"{part.__name__.lower()}.{key}" if part is not Machine else key
    for part in (Machine, Engine, Kernel, Gpu, Cpu)
    for key in part.model_fields
}


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
    if not isinstance(data, dict):
        raise PykernelsError(f"{path} holds no machine", "Write a mapping with name, cpu and gpu")
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        raise _mistake(path, error) from None
    parts = [("cpu", machine.cpu), ("gpu", machine.gpu)]
    for name, part in parts:
        if part is not None and OTHER not in part.kernels:
            raise PykernelsError(
                f"{path}: {name}.kernels has no {OTHER!r}, by which formats count that it does"
                " not name",
                f"Add {OTHER}: {{tflops: ...}}",
            )
    return machine


def _mistake(path: Path, error: ValidationError) -> PykernelsError:
    """What is wrong first: a key that is not known before all others, since it is why another one
    is missing."""
    found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")[0]
    place, kind = ".".join(map(str, found["loc"])), found["type"]
    if kind == "extra_forbidden":
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
