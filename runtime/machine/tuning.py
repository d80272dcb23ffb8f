"""What was measured once for this machine and is chosen by it, kept beside the compiled kernels.

``runtime.profiling.calibrate`` writes it, the experts read it when made. Where there is no file the
choices are the defaults below; nothing is ever measured on the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pykernels.cpu.isa import instructions
from pykernels.cpu.moe.kernel import NEVER
from pykernels.cpu.moe.plan import gemm_from_here
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.registry import get_backend
from pykernels.target import detect

VERSION = 8
"""Of the file. Raise it when a kernel or ``key`` changes so much that old choices are wrong: files
of another version count as none."""


@dataclass(frozen=True)
class Choices:
    """For one weight format. A new choice is a field with its default.

    Attributes:
        gemm_from: tokens of an expert from which its weights go through the GEMM.
    """

    gemm_from: int

    def __str__(self) -> str:
        if self.gemm_from >= NEVER:
            return "tiles always"
        return f"GEMM from {self.gemm_from} tokens an expert"


def default(backend: str, fmt: str, activations: str = "bf16") -> Choices:
    """Where nothing was calibrated."""
    return Choices(gemm_from_here(backend, fmt, activations) or NEVER)


def path(cpu: str) -> Path:
    """The file of a CPU, by its name (``Target.cpu``)."""
    return env.cache_dir / f"choices-{slug(cpu)}.json"


def slug(name: str) -> str:
    """What may be a file's: "Xeon(R) 8592+" is xeon-r-8592+, another than an 8592."""
    return "-".join(re.findall(r"[a-z0-9.+]+", name.lower()))


def key(backend: str, fmt: str, activations: str = "bf16") -> str:
    """What choices are kept by: "avx512/avx512-bf16-vnni/fp8/bf16".

    The second is the set of instructions: what ``PYKERNELS_ISA`` hides moves where paths cross.
    """
    return f"{backend}/{instructions(detect()).name}/{fmt}/{activations}"


def read(cpu: str) -> dict[str, Choices]:
    """What was calibrated on this CPU, by ``key``; empty where nothing was.

    Raises:
        PykernelsError: the file is there and cannot be read.
    """
    return {name: Choices(**entry["choices"]) for name, entry in _entries(cpu).items()}


def chosen(backend: str, fmt: str, cpu: str, activations: str = "bf16") -> Choices:
    """The choices for a format: calibrated, or the default.

    Args:
        backend: one without a GEMM has nothing to choose.

    Raises:
        PykernelsError: the file is there and cannot be read.
    """
    otherwise = default(backend, fmt, activations)
    if get_backend(backend).gemm_from is None:
        return otherwise
    return read(cpu).get(key(backend, fmt, activations), otherwise)


def write(cpu: str, name: str, choices: Choices, how: dict[str, Any]) -> Path:
    """Keeps choices beside those for other formats; returns the file. Processes that calibrate at
    the same time take turns.

    Args:
        name: of ``key``.
        how: what they were taken from, for a person to look at: plain JSON.

    Raises:
        PykernelsError: the file cannot be written, or the one that is there cannot be read.
    """
    with _successor(path(cpu)) as fresh:
        entries = _entries(cpu) | {name: {"choices": asdict(choices), "measured": how}}
        text = json.dumps({"version": VERSION, "cpu": cpu, "formats": entries}, indent=1)
        fresh.write_text(text + "\n")
        fresh.replace(path(cpu))  # readers see the old file or the new one, never half of one
    return path(cpu)


def check_writable(cpu: str) -> None:
    """Whether ``write`` could: for who would be told only after long measurements.

    Raises:
        PykernelsError: the file could not be written.
    """
    with _successor(path(cpu)) as fresh:
        fresh.touch()


@contextlib.contextmanager
def _successor(target: Path) -> Iterator[Path]:
    """Where to write what becomes a file, beside it; nothing is left there behind the block.

    One name for all processes, which take turns: what a killed one has left, the next one takes.
    Where a file system gives them no turns each has a name of its own: an entry may be lost then,
    but the file is whole.

    Raises:
        PykernelsError: the folder or the file cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent) as in_turn:
            own = "" if in_turn else f".{uuid4().hex}"
            fresh = target.with_name(f"{target.name}{own}.new")
            try:
                yield fresh
            finally:
                fresh.unlink(missing_ok=True)
    except OSError as error:
        raise PykernelsError(
            f"the calibration {target} cannot be written: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may write to",
        ) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Keeps other processes that ask for the same out of a block; False where that cannot be had.

    NFS refuses it: its locks want their file open for writing, which no folder is (man 2 flock).
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            in_turn = True
        except OSError:
            in_turn = False
        yield in_turn
    finally:
        os.close(handle)  # and the lock goes with it


def _entries(cpu: str) -> dict[str, Any]:
    """The file's formats; empty if there is no file or it is of another version."""
    file = path(cpu)
    try:
        whole = json.loads(file.read_text())
        if whole["version"] != VERSION:
            return {}
        for entry in whole["formats"].values():
            for name, n in asdict(Choices(**entry["choices"])).items():
                if type(n) is not int or not 1 <= n <= NEVER:
                    raise ValueError(f"{name} is {n!r}, no whole number from 1 to 2**62")
        return dict(whole["formats"])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise PykernelsError(
            f"the calibration {file} cannot be read: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may read and write",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise PykernelsError(
            f"the calibration {file} cannot be read ({what})", "Delete it; then calibrate again"
        ) from None
