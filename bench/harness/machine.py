"""Where and with what a run was made."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pykernels import __version__
from pykernels.checkout import commit, dirty
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.target import Target
from runtime.machine import tuning
from runtime.machine.topology import Topology

if TYPE_CHECKING:
    import torch

Machine = dict[str, Any]
"""``name``, ``slug`` (its folder), ``date``, ``about`` (one sentence), ``versions``, numbers."""


def slug(name: str) -> str:
    """A folder's name: "AMD EPYC (znver5) 2 cores" -> "amd-epyc-znver5-2-cores"."""
    return tuning.slug(re.sub(r"\((r|tm)\)", "", name.lower()))


def _describe(name: str, folder: str, about: str, versions: dict[str, str]) -> Machine:
    return {
        "name": name,
        "slug": slug(folder),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "about": about,
        "versions": {
            "pykernels": f"{sha}{'+' * dirty()}" if (sha := commit()) else __version__,
            "python": platform.python_version(),
            **versions,
        },
    }


def describe_cpu(target: Target) -> Machine:
    """The CPU, its memory, and versions."""
    topology = Topology.detect()
    load = round(os.getloadavg()[0], 2)
    about = (
        f"{', '.join(sorted(target.isa))}; L3 {target.l3 >> 20} MiB, memory"
        f" {topology.memory_total / 2**30:.0f} GiB, huge pages {topology.huge_pages}, load before"
        f" the run {load}."
    )
    names = ("numba", "llvmlite", "torch", "numpy")
    versions = {name: metadata.version(name) for name in names}
    name = target.cpu
    if env.isa:  # as another CPU: a folder of its own
        name += f" without {'AVX-512' if 'avx512f' in env.isa else ' '.join(sorted(env.isa))}"
    folder = f"{name} {topology.usable} cores"
    found = _describe(name, folder, about, versions)
    return found | {"cores": topology.usable, "l3_bytes": target.l3, "load_before": load}


def describe_gpu(device: torch.device) -> Machine:
    """The GPU and versions; "interpreter" where there is none."""
    import torch

    from .timing.timer import l2_bytes

    cuda = device.type == "cuda"
    gpu = torch.cuda.get_device_properties(device) if cuda else None
    about = "Triton's interpreter."
    if gpu:
        about = (
            f"Compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count}"
            f" multiprocessors, L2 {l2_bytes(device) >> 20} MiB, memory"
            f" {gpu.total_memory / 2**30:.0f} GiB."
        )
    name = gpu.name if gpu else "interpreter"
    versions = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "triton": metadata.version("triton"),
    }
    return _describe(name, name, about, versions)


def check_gpu(name: str) -> torch.device:
    """The device of that name, made the current one.

    Raises:
        PykernelsError: it is no CUDA GPU of this machine, or Triton is missing.
    """
    import torch

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


def describe_machine(target: Target, device: str) -> Machine:
    """The CPU; where ``device`` is no "cpu", with that GPU."""
    if device == "cpu":
        return describe_cpu(target)
    import torch

    cpu, gpu = describe_cpu(target), describe_gpu(torch.device(device))
    short = re.search(r"\((\w+)\)$", target.cpu)
    cores = f"{cpu['cores']} {short[1] if short else target.cpu} cores"
    name = re.sub(r" \d+GB.*", "", gpu["name"])  # "NVIDIA H100 80GB HBM3"
    return cpu | {
        "name": f"{gpu['name']} with {cores}",
        "slug": slug(f"{name} with {cores}"),
        "about": f"{gpu['about']} {cpu['about']}",
        "versions": cpu["versions"] | gpu["versions"],
    }
