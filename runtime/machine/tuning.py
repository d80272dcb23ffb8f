"""From how many tokens an expert takes the GEMM on this machine: what was calibrated, or a default.

``pykernels calibrate`` measures it, ``CpuExperts`` reads it. One JSON file ``{format: tokens}``
in the cache folder for each CPU, kernel, set of instructions (``PYKERNELS_ISA`` moves where the two
paths cross) and kind of activations.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pykernels.cpu.isa import instructions
from pykernels.cpu.moe.kernel import NO_GEMM
from pykernels.cpu.moe.plan import gemm_from_here
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.target import detect

_VERSION = 1  # part of the file's name: raise it when a kernel changes so much that it is outdated


def slug(name: str) -> str:
    """What may be part of a file's name: "Xeon(R) 8592+" is xeon-r-8592+, not an 8592."""
    return "-".join(re.findall(r"[a-z0-9.+]+", name.lower()))


def path(backend: str, activations: str = "bf16") -> Path:
    """The file of a kernel on this CPU."""
    target = detect()
    name = slug(f"{target.cpu} {backend} {instructions(target).name} {activations}")
    return env.cache_dir / f"gemm-from-{name}-v{_VERSION}.json"


def read(backend: str, activations: str = "bf16") -> dict[str, int]:
    """What was calibrated, by format; empty where nothing was.

    Raises:
        PykernelsError: there is a file, and it cannot be read.
    """
    file = path(backend, activations)
    try:
        thresholds: dict[str, int] = json.loads(file.read_text())
        if not all(
            type(tokens) is int and 1 <= tokens <= NO_GEMM for tokens in thresholds.values()
        ):
            raise ValueError("a value is no whole number from 1 to 2**62")
        return thresholds
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PykernelsError(
            f"the calibration {file} cannot be read ({error})",
            "Delete it and calibrate again, or point PYKERNELS_CACHE_DIR at another folder",
        ) from None


def gemm_from(backend: str, fmt: str, activations: str = "bf16") -> int:
    """Tokens of an expert from which it takes the GEMM: calibrated, or else the default.

    Raises:
        PykernelsError: there is a file, and it cannot be read.
    """
    usual = default(backend, fmt, activations)
    return usual if usual == NO_GEMM else read(backend, activations).get(fmt, usual)


def default(backend: str, fmt: str, activations: str = "bf16") -> int:
    """The threshold where nothing was calibrated; ``NO_GEMM`` for a kernel without a GEMM."""
    return gemm_from_here(backend, fmt, activations) or NO_GEMM


def describe(tokens: int) -> str:
    """A threshold in words."""
    return "tiles always" if tokens >= NO_GEMM else f"GEMM from {tokens} tokens an expert"


def write(backend: str, tokens: Mapping[str, int], activations: str = "bf16") -> Path:
    """Keeps the numbers of some formats beside the others'; returns the file.

    Readers see the old file or the new one. Of two processes that write at once, one may win.

    Args:
        tokens: by format; none of them only tries whether the file can be written.

    Raises:
        PykernelsError: the file cannot be written, or the one that is there cannot be read.
    """
    file, thresholds = path(backend, activations), read(backend, activations)
    fresh = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(json.dumps({**thresholds, **tokens}, indent=1) + "\n")
            fresh.replace(file)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise PykernelsError(
            f"the calibration {file} cannot be written: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may write to",
        ) from None
    return file
