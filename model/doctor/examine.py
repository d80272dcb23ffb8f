"""What this machine can do: `pykernels doctor`, and `examine()` in a notebook.

Each `look_at_*` function yields the facts of one section of the report. A fact with a `problem` is
something needed that is missing or wrong; it has a hint, and the command then exits with code 1.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pykernels import __version__
from pykernels.env import env
from pykernels.errors import PykernelsError

from ..extras import pinned
from .report import Fact, Report
from .selftest import look_at_results
from .topology import topology_facts

NEEDED_VERSIONS = {
    "torch": "2.11",
    "transformers": "5.17",
    "numba": "0.68",
    "llvmlite": "0.50",
    "numpy": "2.0",
}
"""The oldest supported; the same as in pyproject.toml (a test compares them)."""

NEEDED_MEMORY = 1 << 30
"""Bytes: Python, torch and the embedded model come to about 0.7 GiB."""

GIB = 1 << 30
PROBE = 64 << 20
"""Bytes that are put in memory as weights are, to see their pages."""


def examine(
    progress: Callable[[str], None] = lambda what: None,
    known: Callable[[str, Fact], None] = lambda section, fact: None,
    every: bool = False,
) -> Report:
    """Every section of the report, what takes long last: kernels that were never run are compiled.

    Args:
        progress: called with what is under way.
        known: called with each fact, and the name of its section, as soon as it is known.
        every: whether all formats are tried, on all kernels that this CPU can run, and not only
            the common ones on those that are used.
    """
    looks: dict[str, Callable[[], Iterator[Fact]]] = {
        "machine": look_at_machine,
        "versions": look_at_versions,
        "memory": look_at_memory,
        "GPU": look_at_gpu,
        "expert kernels": look_at_kernels,
        "calibration": look_at_calibration,
        "flags": look_at_flags,
        "speed": look_at_speed,
        "self-test": lambda: look_at_results(every, lambda what: progress(f"self-test: {what}")),
    }
    report = Report()
    for section, look in looks.items():
        progress(section)
        facts = report.sections[section] = []
        for fact in _guarded(section, look):
            facts.append(fact)
            known(section, fact)
    return report


def _guarded(section: str, look: Callable[[], Iterator[Fact]]) -> Iterator[Fact]:
    """The facts of one section; an error in it becomes a fact, and the report goes on."""
    try:
        yield from look()
    except PykernelsError as error:
        yield Fact(section, "failed", error.cause, error.hint)
    except ImportError as error:
        yield Fact(section, "failed", f"{error}", "Set it up again: make clean, then make run")
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        yield Fact(section, "failed", what, "Report this with the output of pykernels doctor")


def look_at_machine() -> Iterator[Fact]:
    """System, CPU, instruction sets, and the cores that this process may use."""
    bits, system = 64 if sys.maxsize > 2**32 else 32, platform.system()
    wrong = bits != 64 or system != "Linux"
    yield Fact(
        "system",
        f"{system} {platform.release()}, {platform.machine()}, {bits} bits",
        "pykernels runs on 64-bit Linux only" if wrong else "",
        "Use a 64-bit Linux, in a virtual machine or a container if need be",
    )
    from pykernels.target import ISA_NAMES, detect
    from runtime.machine.topology import Topology

    target = detect()
    yield Fact("CPU", target.cpu)
    yield Fact("has", " ".join(n for n in ISA_NAMES if n in target.isa) or "none that we use")
    if lacks := target.lacks(ISA_NAMES):
        yield Fact("lacks", " ".join(lacks))
    yield from topology_facts(Topology.detect())


def look_at_memory() -> Iterator[Fact]:
    """Main memory, cgroup limits included, and huge pages."""
    from runtime.machine.memory import allocate, collapse, huge_bytes
    from runtime.machine.topology import Topology

    topology = Topology.detect()
    free = topology.memory_available
    yield Fact(
        "main memory",
        f"{free / GIB:.1f} GiB free of {topology.memory_total / GIB:.1f} GiB",
        f"Only {free / GIB:.2f} GiB of memory are free" if free < NEEDED_MEMORY else "",
        f"Free memory until there is {NEEDED_MEMORY / GIB:.0f} GiB for the embedded model",
    )
    yield huge_pages(topology.huge_pages, env.hugepages)
    probe = allocate(PROBE)
    probe.fill_(1)
    collapse(probe)
    yield Fact("as weights are", f"{huge_bytes(probe) >> 20} of {PROBE >> 20} MiB in huge pages")


def huge_pages(mode: str, wanted: bool) -> Fact:
    """Transparent huge pages: `mode` is "always", "madvise", "never" or "unknown"."""
    off = mode == "never" and wanted
    return Fact(
        "huge pages",
        mode if wanted else f"{mode}, not asked for (PYKERNELS_HUGEPAGES=0)",
        "Transparent huge pages are off, so reading the experts is slower" if off else "",
        "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; "
        "or accept it: PYKERNELS_HUGEPAGES=0",
    )


def look_at_gpu() -> Iterator[Fact]:
    """CUDA devices; without one everything runs on the CPU."""
    import torch

    from pykernels.target import detect

    gpus = detect().gpus
    if not gpus:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        yield Fact("GPU", f"none (this torch is built for {build}); not needed")
    for gpu in gpus:
        free, total = torch.cuda.mem_get_info(gpu.index)
        arch = f"compute capability {gpu.arch[0]}.{gpu.arch[1]}"
        memory = f"{free / GIB:.0f} GiB free of {total / GIB:.0f} GiB"
        yield Fact(f"cuda:{gpu.index}", f"{gpu.name}, {arch}, {memory}")
    if gpus:
        yield Fact("driver", f"{_driver()}; torch is built for CUDA {torch.version.cuda}")


def _driver() -> str:
    """The driver's version and the newest CUDA that it supports (13000 stands for 13.0)."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return f"{match[1]}, for up to {cuda}" if match else f"for up to {cuda}"


def look_at_versions() -> Iterator[Fact]:
    """Python and the libraries, against the oldest supported versions."""
    yield Fact("pykernels", __version__)
    yield Fact("python", platform.python_version())
    for name, oldest in NEEDED_VERSIONS.items():
        try:
            yield version_fact(name, importlib.import_module(name).__version__, oldest)
        except ImportError as error:
            hint = f"Install it: pip install {pinned()}'{name}>={oldest}'"
            yield Fact(name, "missing", f"{name} cannot be imported: {error}", hint)


def version_fact(name: str, installed: str, oldest: str) -> Fact:
    """`installed` as a fact, with a problem if it is older than `oldest`."""
    old = _numbers(installed) < _numbers(oldest)
    return Fact(
        name,
        installed,
        f"{name} {installed} is older than {oldest}" if old else "",
        f"Install a newer one: pip install {pinned()}'{name}>={oldest}'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def look_at_kernels() -> Iterator[Fact]:
    """Which kernel each weight format gets, and why not each other one."""
    from pykernels.quant import FORMATS
    from pykernels.registry import kernels, resolve
    from pykernels.target import detect

    target = detect()
    for fmt in FORMATS:
        try:
            chosen = resolve("auto", fmt, target)
        except PykernelsError as error:  # PYKERNELS_KERNEL names one that cannot run here
            yield Fact(fmt, "none", error.cause, error.hint)
            continue
        asked = f"PYKERNELS_KERNEL is {env.kernel}"
        first = f"{chosen.name} is faster" if env.kernel == "auto" else asked
        others = [
            f"not {backend.name}: {backend.supports(fmt, target) or first}"
            for backend in kernels()
            if backend is not chosen
        ]
        yield Fact(fmt, "; ".join([f"{chosen.name} ({chosen.doc})", *others]))


def look_at_calibration() -> Iterator[Fact]:
    """From how many tokens an expert uses the GEMM: calibrated on this machine, or the default."""
    from pykernels.quant import FORMATS
    from pykernels.registry import resolve
    from pykernels.target import detect
    from runtime.machine import tuning

    target = detect()
    chosen = {fmt: resolve("auto", fmt, target) for fmt in FORMATS}
    backends = {fmt: backend.name for fmt, backend in chosen.items()}
    able = [fmt for fmt in FORMATS if chosen[fmt].gemm_from]
    if not able:
        yield Fact("GEMM from", "nothing to choose: no kernel in use here has a GEMM")
    for fmt in able:
        calibrated = fmt in tuning.read(backends[fmt])
        how = "calibrated" if calibrated else "default; `pykernels calibrate` measures it"
        yield Fact(fmt, f"{tuning.describe(tuning.gemm_from(backends[fmt], fmt))} ({how})")


def look_at_speed() -> Iterator[Fact]:
    """The read roof, which bounds the experts when one token is decoded."""
    from runtime.profiling.roofline import read_roof
    from runtime.workers.pool import default_pool

    pool = default_pool()
    nodes = f" of {len(pool.nodes)} NUMA nodes" if pool.is_split else ""
    rate = f"{read_roof(pool):.1f} GB/s"
    yield Fact("read roof", f"{rate} on {pool.threads} threads{nodes}, measured now")


def look_at_flags() -> Iterator[Fact]:
    """The PYKERNELS_* flags as they are set."""
    for flag in env.table():
        changed = "" if flag.value == flag.default else f" (default: {flag.default or 'unset'})"
        yield Fact(flag.name, f"{flag.value or 'unset'}{changed} · {flag.doc}")
