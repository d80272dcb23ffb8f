"""What this machine can do, looked at and tried: `pykernels doctor`, and `examine()` in a notebook.

Each `look_at_*` function below gives the facts of one section. A fact with a `problem` is something
that is needed and missing; it comes with its hint and makes the command exit with code 1.
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

from .report import Fact, Report
from .topology import topology_facts

NEEDED_VERSIONS = {
    "torch": "2.11",
    "transformers": "5.17",
    "numba": "0.68",
    "llvmlite": "0.50",
    "numpy": "2.0",
}
"""The oldest that do; the same as in pyproject.toml (a test compares them)."""

NEEDED_MEMORY = 1 << 30
"""Bytes: Python, torch and the embedded model come to about 0.7 GiB."""

RESULT_TOLERANCE = 0.01
"""Relative error (norm over norm) of a kernel's result that the self-test accepts."""

GIB = 1 << 30


def examine(progress: Callable[[str], None] = lambda what: None) -> Report:
    """Look at this machine and try the kernels on it; takes some seconds.

    Args:
        progress: called with what is looked at next.
    """
    looks: dict[str, Callable[[], Iterator[Fact]]] = {
        "machine": look_at_machine,
        "memory": look_at_memory,
        "GPU": look_at_gpu,
        "versions": look_at_versions,
        "expert kernels": look_at_kernels,
        "calibration": look_at_calibration,
        "self-test": look_at_results,
        "speed": look_at_speed,
        "flags": look_at_flags,
    }
    report = Report()
    for section, look in looks.items():
        progress(section)
        report.sections[section] = list(_steadily(section, look))
    return report


def _steadily(section: str, look: Callable[[], Iterator[Fact]]) -> Iterator[Fact]:
    """The facts of one section; whatever ends it early is a fact too, and the report goes on."""
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
    """System, CPU, instruction sets, the cores that this process may use."""
    from pykernels.target import ISA_NAMES, detect
    from runtime.machine.topology import Topology

    bits, system = 64 if sys.maxsize > 2**32 else 32, platform.system()
    wrong = bits != 64 or system != "Linux"
    yield Fact(
        "system",
        f"{system} {platform.release()}, {platform.machine()}, {bits} bits",
        "pykernels runs on 64-bit Linux only" if wrong else "",
        "Use a 64-bit Linux, in a virtual machine or a container if need be",
    )
    target = detect()
    yield Fact("CPU", target.cpu)
    yield Fact("has", " ".join(n for n in ISA_NAMES if n in target.isa) or "none that we use")
    if lacks := target.lacks(ISA_NAMES):
        yield Fact("lacks", " ".join(lacks))
    yield from topology_facts(Topology.detect())


def look_at_memory() -> Iterator[Fact]:
    """Main memory, cgroup limits included, and huge pages."""
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


def huge_pages(mode: str, wanted: bool) -> Fact:
    """The mode of transparent huge pages ("always", "madvise", "never", "unknown") as a fact."""
    off = mode == "never" and wanted
    return Fact(
        "huge pages",
        mode if wanted else f"{mode}, not asked for (PYKERNELS_HUGEPAGES=0)",
        "Transparent huge pages are off, so reading the experts is slower" if off else "",
        "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; "
        "or accept it: PYKERNELS_HUGEPAGES=0",
    )


def look_at_gpu() -> Iterator[Fact]:
    """CUDA devices. None is fine: everything runs on the CPU then."""
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
    """The driver's version and the newest CUDA that it can do (13000 stands for 13.0)."""
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
    """Python and the libraries, against the oldest that do."""
    yield Fact("pykernels", __version__)
    yield Fact("python", platform.python_version())
    for name, oldest in NEEDED_VERSIONS.items():
        try:
            yield version_fact(name, importlib.import_module(name).__version__, oldest)
        except ImportError as error:
            hint = f"Install it: pip install -c constraints.txt '{name}>={oldest}'"
            yield Fact(name, "missing", f"{name} cannot be imported: {error}", hint)


def version_fact(name: str, found: str, oldest: str) -> Fact:
    """`found` as a fact, with a problem if it is older than `oldest`."""
    old = _numbers(found) < _numbers(oldest)
    return Fact(
        name,
        found,
        f"{name} {found} is older than {oldest}" if old else "",
        f"Install a newer one: pip install -c constraints.txt '{name}>={oldest}'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def look_at_kernels() -> Iterator[Fact]:
    """Which backend each weight format gets, and why each other one is not it."""
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
    """From how many tokens an expert takes the GEMM: measured here, or the default."""
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


def look_at_results() -> Iterator[Fact]:
    """A tiny MoE layer on every kernel that can run here, against the float32 reference."""
    from pykernels.quant import FORMATS
    from pykernels.registry import kernels
    from pykernels.target import detect

    target = detect()
    for fmt in FORMATS:
        for backend in kernels():
            if backend.supports(fmt, target) is None:
                yield result_fact(fmt, backend.name)


def result_fact(fmt: str, kernel: str) -> Fact:
    """One kernel's result on a small layer, against the float32 reference."""
    import torch

    from pykernels import ref
    from pykernels.quant import get_format
    from pykernels.shapes import MoEShape
    from runtime.experts.routed import RoutedExperts

    shape = MoEShape(E=4, H=256, I=256, topk=2)  # expert 3 gets no token
    quantize = get_format(fmt).quantize
    random = torch.Generator().manual_seed(0)

    def matrix(N: int, K: int) -> torch.Tensor:
        return torch.randn(N, K, generator=random) / K**0.5

    name, hint = f"{fmt} on {kernel}", "Use --kernel generic and report this CPU"
    try:
        experts = RoutedExperts(shape, fmt, kernel=kernel)
        for expert in range(shape.E):
            gate, up = matrix(shape.I, shape.H), matrix(shape.I, shape.H)
            down = matrix(shape.H, shape.I)
            experts.load_expert(expert, quantize(gate), quantize(up), quantize(down))
        x = torch.randn(3, shape.H, generator=random).to(torch.bfloat16).float()  # [T, H]
        ids = torch.tensor([[0, 1], [1, 2], [0, 2]])  # [T, topk]
        weights = torch.rand(3, shape.topk, generator=random)  # [T, topk]
        result = experts(x, ids, weights)
        truth = ref.moe_ffn(x, ids, weights, experts.weights.slices[0])
    except PykernelsError as error:
        return Fact(name, "failed", error.cause, error.hint)
    except Exception as error:  # whatever a kernel dies of, the report goes on
        return Fact(name, "failed", f"{name}: {type(error).__name__}: {error}", hint)
    return judge(name, float((result - truth).norm() / truth.norm()), hint)


def judge(name: str, distance: float, hint: str) -> Fact:
    """A result at this relative distance from the truth, as a fact."""
    # h is rounded to bf16's 8 bits: about 0.2 % is the arithmetic's own. `not <=`: NaN is wrong.
    wrong = not distance <= RESULT_TOLERANCE
    problem = f"{name} is wrong: its result is {distance:.1%} from the reference" if wrong else ""
    return Fact(name, f"{distance:.2%} from the float32 reference", problem, hint)


def look_at_speed() -> Iterator[Fact]:
    """The read roof: what bounds the experts when one token is decoded."""
    from runtime.profiling.roofline import read_roof
    from runtime.workers.pool import default_pool

    pool = default_pool()
    nodes = f" of {len(pool.pools)} NUMA nodes" if len(pool.pools) > 1 else ""
    rate = f"{read_roof(pool):.1f} GB/s"
    yield Fact("read roof", f"{rate} on {pool.threads} threads{nodes}, measured now")


def look_at_flags() -> Iterator[Fact]:
    """The PYKERNELS_* flags as they are set."""
    for flag in env.table():
        changed = "" if flag.value == flag.default else f" (default: {flag.default or 'unset'})"
        yield Fact(flag.name, f"{flag.value or 'unset'}{changed} · {flag.doc}")
