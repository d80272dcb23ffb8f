"""What every tier shares: quiet OpenMP threads and honest skips on missing hardware."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator

# Before torch is imported: its idle OpenMP threads would spin on the cores of the pinned workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before NumPy is: two threads of OpenBLAS spin against each other at the small products of Triton's
# interpreter (64 x 128 x 128 took 46 ms with two of them on two cores, 0.04 ms with one).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nothing in a test may reach for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell starts what it puts in the background deaf to Ctrl-C, and so would be the processes that
# tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Importing, collecting and compiling make garbage by the million objects: look for it less often. A
# tenth of the time of a kernel's first compilation went into that, and of collecting.
gc.set_threshold(300_000, 20, 20)

import pytest  # noqa: E402
import torch  # noqa: E402
from _pytest.faulthandler import fault_handler_stderr_fd_key  # noqa: E402

from .interpreter import quicken  # noqa: E402

# Before Triton is imported, by whatever test (transformers does): what it decorates then stays so.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Nor is garbage looked for in modules and tests, which stay."""
    gc.collect()
    gc.freeze()
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        quicken()


HANGS = 1200.0
"""Seconds after which a test is taken to hang. Far above any test's time, even on a busy machine:
the longest takes about 30 s of a processor, nearly all of it compiling."""


@pytest.fixture(autouse=True)
def on_the_cpu_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded without a device is on the CPU, on machines with GPUs as well: tests
    must mean the same on each."""
    if torch.cuda.is_available():
        monkeypatch.setattr("runtime.devices.gpus.usable_gpus", list)


@pytest.fixture(autouse=True)
def ended_if_it_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiled code that waits for ever cannot be interrupted by Ctrl-C or an alarm. So the process
    ends, and prints where its threads are."""
    stderr = request.config.stash[fault_handler_stderr_fd_key]  # not the one that is captured
    faulthandler.dump_traceback_later(HANGS, file=stderr, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def generic_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models run on the generic kernels, which take a fifth of the time to compile, unless a test
    names others: what a kernel computes is tested in tests/cpu."""
    with pytest.MonkeyPatch.context() as patch:
        folder = request.path.relative_to(request.config.rootpath).parts[1]
        if folder in ("bench", "engine", "model"):
            patch.setenv("PYKERNELS_KERNEL", "generic")
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_by_one_process() -> None:
    """No process beside the engine compiles what it needs last: the other worker has that core."""
    from runtime.devices.cpu import precompile

    precompile.begin = lambda *sizes: None  # type: ignore[assignment]


def _missing_amx() -> str | None:
    from pykernels.target import detect

    missing = {"amx-tile", "amx-bf16"} - {name.replace("_", "-") for name in detect().isa}
    return f"this CPU has no {', '.join(sorted(missing))}" if missing else None


def _missing_gpu() -> str | None:
    return None if torch.cuda.is_available() else "this machine has no CUDA GPU"


EXPERTS = ("tests/amx", "tests/cpu/gemm", "tests/cpu/gemv", "tests/cpu/moe")
"""Folders that compile the same kernels: one worker runs them, or both would compile each."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """``--dist loadfile``, where the folders of ``EXPERTS`` count as one file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByKernels(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "experts" if nodeid.startswith(EXPERTS) else super()._split_scope(nodeid)

    return ByKernels(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "also the variants that are left out by default: see tests/cpu/kernels.py"
    parser.addoption("--all", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the mark `all` is for; skip what the marks `amx` (or that folder) and `gpu`
    need and this machine lacks.

    Not the folder gpu/: without a GPU its small cases run in Triton's interpreter.
    """
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("all")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("all")]
    checks = {"amx": _missing_amx, "gpu": _missing_gpu}
    for tier, check in checks.items():
        folder = tier if tier != "gpu" else None
        chosen = [i for i in items if i.get_closest_marker(tier) or i.path.parent.name == folder]
        if chosen and (reason := check()):
            for item in chosen:
                item.add_marker(pytest.mark.skip(reason=reason))
