"""The Triton kernels beside the roofs of this GPU, each checked against ``pykernels.ref`` first.

What is timed are the rows of ``bench/cases``, as `make bench-gpu` times them: replays of a CUDA
graph of many calls, which rotate over inputs that together are larger than L2. A round is a replay,
and its time that of one call by the GPU's own events, not by Python's clock.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from bench.cases import truth  # noqa: E402
from bench.cases.gpu_run import check_flags, module_of  # noqa: E402
from bench.gpu import flags  # noqa: E402
from bench.handshake import HOPS, Hops  # noqa: E402
from bench.harness.case import Case, Entry  # noqa: E402
from bench.harness.machine import check_gpu  # noqa: E402
from bench.harness.roofs import measure_roofs  # noqa: E402
from bench.harness.rows import figures  # noqa: E402
from bench.harness.timer import make_timer  # noqa: E402
from bench.harness.turns import Times  # noqa: E402
from pykernels.errors import PykernelsError  # noqa: E402
from pykernels.gpu.common import stream_memory  # noqa: E402

OPS = {"attention": "attention", "experts": "moe", "linear": "linear", "router": "router"}
"""The names of ``bench_gpu_NAME`` and of ``--shape``, and those of the files in ``bench/cases``."""
HIDDEN, TOPK = 7168, 8
"""Of the handshake, as ``python -m bench.handshake`` has them."""


@dataclass
class Clock:
    """pytest-benchmark's timer: it stands still but for the seconds that somebody else measured."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def tell(self, benchmark: Any, seconds: list[float]) -> None:
        """A round for each of these."""
        left = iter(seconds)

        def turn() -> None:
            self.now += next(left)

        benchmark.pedantic(turn, rounds=len(seconds))


CLOCK = Clock()
pytestmark = pytest.mark.benchmark(timer=CLOCK)


def entries(name: str, config: pytest.Config) -> list[Entry]:
    """What is timed of ``bench_gpu_NAME``: its given shapes, or else the op's table.

    Raises:
        pytest.UsageError: there is no such op, or it has no such flag.
    """
    given = []
    for shape in config.getoption("shape"):
        of, _, pairs = shape.partition(":")
        try:
            if of not in OPS:
                raise PykernelsError("it begins with no op", f"Use {', '.join(OPS)} and a colon")
            sizes = flags(pairs.split(",")) if pairs else {}
            check_flags(OPS[of], sizes)
        except PykernelsError as error:
            raise pytest.UsageError(f"--shape {shape}: {error}") from None
        if of == name:
            make = functools.partial(module_of(OPS[of]).case, **sizes)
            given.append(Entry(OPS[of], pairs or "default", make))
    return given or list(module_of(OPS[name]).table(quick=not config.getoption("full")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A benchmark for each entry."""
    if "entry" in metafunc.fixturenames:
        found = entries(metafunc.function.__name__.removeprefix("bench_gpu_"), metafunc.config)
        metafunc.parametrize("entry", found, ids=[entry.name for entry in found])


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Of ``--device``; "cpu", in Triton's interpreter, is for trying a case of one's own."""
    name = request.config.getoption("device")
    if name == "cpu":
        return torch.device("cpu")
    try:
        return check_gpu(name)
    except PykernelsError as error:
        pytest.skip(f"no Triton kernel is timed: {error}")


@pytest.fixture
def seconds(request: pytest.FixtureRequest, device: torch.device) -> Iterator[float]:
    """How long a case is timed. Then its memory is free: a capture cannot ask for it."""
    yield float(request.config.getoption("benchmark_max_time"))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(benchmark: Any, entry: Entry, device: torch.device, seconds: float) -> None:
    """The case's error, then its times.

    Raises:
        AssertionError: its result is not that of ``pykernels.ref``.
    """
    case = entry.make(device)
    error = checked(case)
    ready = make_timer(device).prepare(case.run, case.sets, seconds)
    took = [ready() for _ in range(ready.rounds)]
    CLOCK.tell(benchmark, took)
    roofs = measure_roofs(device)
    times = Times([[(0, each) for each in took]])
    compute = roofs.compute(case.compute)
    row = figures(times, [case.nbytes], case.flops, roofs.read_gbps, compute, case.compute)
    benchmark.extra_info.update(
        gpu=_name(device),
        gbps=row["gbps"],
        roof_gbps=row["read_roof_gbps"],
        tflops=row["tflops"],
        roof_tflops=row["compute_roof_tflops"],
        roof_share=row["roof_share"],
        bound=row["bound"],
        error=error,
        captured=ready.captured,
        **case.params,
    )


def checked(case: Case) -> float:
    """Its relative error. Raises AssertionError if that is too large."""
    assert case.error is not None
    error = case.error()
    assert error < truth.MOST, f"it is wrong: relative error {error:.2g} beside pykernels.ref"
    return error


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"


def bench_gpu_attention(benchmark: Any, entry: Entry, device: torch.device, seconds: float) -> None:
    """Decode over paged caches, and prompts: GQA and MLA."""
    timed(benchmark, entry, device, seconds)


def bench_gpu_experts(benchmark: Any, entry: Entry, device: torch.device, seconds: float) -> None:
    """A layer's routed experts, and its two grouped products."""
    timed(benchmark, entry, device, seconds)


def bench_gpu_linear(benchmark: Any, entry: Entry, device: torch.device, seconds: float) -> None:
    """Quantized weights and one row or many."""
    timed(benchmark, entry, device, seconds)


def bench_gpu_router(benchmark: Any, entry: Entry, device: torch.device, seconds: float) -> None:
    """Gate, choice, sort and the rows' way to the experts and back."""
    timed(benchmark, entry, device, seconds)


@pytest.mark.parametrize("hop", HOPS.values(), ids=[name.replace(", ", "+") for name in HOPS])
def bench_gpu_handshake(benchmark: Any, hop: Any, device: torch.device) -> None:
    """A layer's rows to the CPU and its sums back, without experts: one of 60 hops of a graph."""
    reason = "a hop needs a GPU" if device.type == "cpu" else stream_memory.supports()
    if reason:
        pytest.skip(reason)
    layer = hop.layer(HIDDEN, TOPK)
    error = layer.error()
    assert error < truth.MOST, f"it is wrong: relative error {error:.2g} beside pykernels.ref"
    hops = Hops(60, 100)
    CLOCK.tell(benchmark, hops.time(hop.body(hops, layer), hop.asks))
    benchmark.extra_info.update(gpu=_name(device), error=error)
