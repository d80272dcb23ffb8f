"""The machine that is planned for: a file, one of the repository's, or this one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pykernels.errors import PykernelsError
from runtime.devices.sim.machine import Machine
from runtime.profiling.this_machine import this_machine

from .machine_file import read_machine


def shipped() -> dict[str, Path]:
    """By name, the files of bench/machines, where there is that folder."""
    found = importlib.util.find_spec("bench")
    folders = [
        Path(place) / "machines" for place in (found and found.submodule_search_locations) or ()
    ]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def find_machine(given: str | None, threads: int | None = None) -> Machine:
    """A machine by its file or its name; None: this one, by what is measured and known of it.

    Args:
        threads: that compute on this one; None: as many as by default.

    Raises:
        PykernelsError: there is none of that name; what is wrong with its file.
    """
    if given is None:
        return this_machine(threads)
    path = Path(given)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        known = shipped()
        if given not in known:
            hint = (
                f"Give a YAML file, or one of {', '.join(known)}" if known else "Give a YAML file"
            )
            raise PykernelsError(f"There is no machine {given!r}", hint)
        path = known[given]
    return read_machine(path)
