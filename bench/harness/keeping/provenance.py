"""What every result says of itself: its command, commit, machine and versions.

All JSON that a benchmark writes begins with these keys, so they are flat:

``command``: as it was typed; ``date``: when it began, UTC; ``commit``: of the checkout, "" outside
of one; ``dirty``: whether Python files differ from that commit; ``cpu``; ``gpu``: names of the CUDA
GPUs, "" where none was used; ``versions``: "python 3.12.3, torch 2.9.0, ...".
"""

from __future__ import annotations

import functools
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pykernels.checkout import commit, dirty

PACKAGES = ("numba", "llvmlite", "numpy", "torch", "triton", "transformers", "safetensors")


def provenance() -> dict[str, Any]:
    """The keys above, of this process."""
    from pykernels.target import detect

    return {**_of_process(), "cpu": detect().cpu, "gpu": gpus(), "versions": versions()}


@functools.cache
def _of_process() -> dict[str, Any]:
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"command": command(), "date": date, "commit": commit() or "", "dirty": dirty()}


def command() -> str:
    """The command line of this process, without the folder of its program."""
    program = [Path(sys.argv[0]).name]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec and program[0].endswith(".py"):  # else a script, or a module that is one (as_module)
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def versions() -> str:
    """Python, the packages that kernels depend on, and CUDA where torch has it."""
    versions_ = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions_[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        versions_["CUDA"] = torch.version.cuda
    return ", ".join(f"{name} {version}" for name, version in versions_.items())


def gpus() -> str:
    """Names of the CUDA GPUs, "" until one is used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
