"""What this machine can do: instruction sets, caches, GPU. Read once, passed around as data.

The instruction sets are those that LLVM would compile for here (CPU and operating system both
willing), minus what ``PYKERNELS_ISA`` hides; kernels are gated on them *before* they are compiled,
because an instruction that the target lacks aborts the process inside LLVM.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
from numba.core import config as numba_config
from numba.core.codegen import get_host_cpu_features

from .env import env
from .errors import PykernelsError

ISA_NAMES = (
    "avx2",
    "fma",
    "f16c",
    "avxvnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512bf16",
    "avx512vnni",
    "avx512vbmi",
    "gfni",
    "amx-tile",
    "amx-bf16",
    "amx-int8",
)
"""Features in LLVM's names: all that kernels ask for, and some that tell machines apart."""

_WITH_AMX = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")
"""LLVM's names of CPUs that have tiles."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: ``arch`` is (major, minor) of its compute capability, memory in bytes."""

    index: int
    name: str
    arch: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Target:
    """A machine as the kernels see it.

    Cache sizes are bytes, 0 when unknown: ``l1d`` and ``l2`` of one instance, ``l3`` of all that
    the cores of this process have (a server CPU has several), since weights may lie in any.
    ``vendor`` is the CPU's own word for who made it, "" when unknown.
    """

    cpu: str
    machine: str
    isa: frozenset[str]
    l1d: int
    l2: int
    l3: int
    vendor: str = ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its CUDA devices, counted only when they are asked for: that starts a thread of CUDA's,
        and then no fork of this process can use them."""
        return _gpus()

    def lacks(self, features: Iterable[str]) -> list[str]:
        """The ones of ``features`` that are not here, in the order asked."""
        return [feature for feature in features if feature not in self.isa]


def detect() -> Target:
    """This machine (the hardware is read once; ``PYKERNELS_ISA`` counts at every call).

    Raises:
        PykernelsError: ``PYKERNELS_ISA`` hides a feature that is none of ``ISA_NAMES``.
    """
    if unknown := sorted(env.isa - set(ISA_NAMES)):
        raise PykernelsError(
            f"PYKERNELS_ISA hides {unknown[0]!r}, which is no feature known here",
            f"Hide some of {', '.join(ISA_NAMES)}",
        )
    cpu, vendor, isa, l1d, l2, l3 = _hardware()
    return Target(cpu, platform.machine(), isa - env.isa, l1d, l2, l3, vendor)


@functools.cache
def _hardware() -> tuple[str, str, frozenset[str], int, int, int]:
    l1d, l2, l3 = (cache_sizes(level) for level in (1, 2, 3))
    isa, kind = _compiled_features(), llvm.get_host_cpu_name()
    if "amx-tile" in isa and kind not in _WITH_AMX:  # a hypervisor may give another's model number
        kind = "with AMX"
    name = f"{_cpu_says('model name') or platform.processor()} ({kind})"
    caches = max(l1d, default=0), max(l2, default=0), sum(l3)
    return name, _cpu_says("vendor_id"), isa, *caches


def _compiled_features() -> frozenset[str]:
    """Features that Numba's code generator will use: NUMBA_CPU_FEATURES where set, else the host's,
    of which NUMBA_ENABLE_AVX may hide those of AVX (Numba does for CPUs that it mistrusts).

    A NUMBA_CPU_NAME other than the host's promises nothing that we could check, so it counts as
    having no feature beyond the portable kernels.
    """
    text = numba_config.CPU_FEATURES
    if text is None:
        if numba_config.CPU_NAME not in (None, "", "host", llvm.get_host_cpu_name()):
            return frozenset()
        text = get_host_cpu_features()
    have = {part[1:]: part[0] == "+" for part in text.split(",") if part}  # the last one counts
    return frozenset(name for name in ISA_NAMES if have.get(name, False))


def _cpu_says(field: str) -> str:
    """A field of the first CPU in /proc/cpuinfo; "" where it is not there."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def cache_sizes(
    level: int, root: Path = Path("/"), cores: Iterable[int] | None = None
) -> list[int]:
    """Bytes of each data (or unified) cache of a level that some of ``cores`` has, from sysfs.

    Args:
        root: where ``sys`` lies; another one for tests.
        cores: logical CPUs; None for those that this process may run on.
    """
    sizes: dict[str, int] = {}  # by the CPUs that share it
    for core in os.sched_getaffinity(0) if cores is None else cores:
        for index in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            try:
                if int((index / "level").read_text()) != level:
                    continue
                if (index / "type").read_text().strip() == "Instruction":
                    continue
                size = (index / "size").read_text().strip()
                nbytes = int(size.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
                sizes[(index / "shared_cpu_list").read_text()] = nbytes
            except (OSError, ValueError):
                continue
    return list(sizes.values())


@functools.cache
def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(
        Gpu(i, p.name, (p.major, p.minor), p.total_memory)
        for i in range(torch.cuda.device_count())
        for p in [torch.cuda.get_device_properties(i)]
    )
