"""Which GPU, with what, a run was made on."""

from __future__ import annotations

import importlib.util
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from bench.cpu.machine import commit
from pykernels import __version__
from pykernels.errors import PykernelsError

from .timer import l2_bytes


def check_gpu(name: str) -> torch.device:
    """The device of that name, made the current one.

    Raises:
        PykernelsError: it is no CUDA GPU of this machine, or Triton is missing.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda":
        raise PykernelsError(f"{name!r} is no CUDA device", "Name one: --device cuda:0")
    if not torch.cuda.is_available():
        raise PykernelsError(
            f"this machine has no CUDA GPU that torch {torch.__version__} can use",
            "Run it where there is one; the CPU's kernels are timed by make bench-cpu",
        )
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise PykernelsError(f"there is no {name}, only {count} GPUs", "Name one: --device cuda:0")
    if importlib.util.find_spec("triton") is None:
        raise PykernelsError("Triton is not installed", "pip install triton")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def slug(gpu: str) -> str:
    """A folder's name: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join(re.findall(r"[a-z0-9.]+", gpu.lower()))


def describe(device: torch.device) -> dict[str, Any]:
    """GPU and versions, flat enough for JSON."""
    cuda = device.type == "cuda"
    found = torch.cuda.get_device_properties(device) if cuda else None
    gpu = found.name if found else "interpreter"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": gpu,
        "slug": slug(gpu),
        "capability": f"{found.major}.{found.minor}" if found else "",
        "multiprocessors": found.multi_processor_count if found else 0,
        "memory_bytes": found.total_memory if found else 0,
        "l2_bytes": l2_bytes(device),
        "versions": {
            "pykernels": commit() or __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda or "",
            "triton": metadata.version("triton"),
        },
    }
