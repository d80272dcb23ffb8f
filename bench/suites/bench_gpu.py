"""The Triton kernels beside the roofs of this GPU, each checked against ``pykernels.ref`` first.

What is timed are the rows of ``bench/cases``, as `make bench-gpu` times them: replays of a CUDA
graph of many calls, which rotate over inputs that together are larger than L2. A round is a replay,
and its time that of one call by the GPU's own events, not by Python's clock.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from bench.cases import truth  # noqa: E402
from bench.cases.gpu_run import check_flags, module_of  # noqa: E402
from bench.gpu import flags  # noqa: E402
from bench.harness.timing.case import Case, Entry  # noqa: E402
from bench.harness.timing.roofs import measure_roofs  # noqa: E402
from bench.harness.timing.rows import figures  # noqa: E402
from bench.harness.timing.timer import make_timer  # noqa: E402
from bench.harness.timing.turns import Times  # noqa: E402
from bench.suites import gpu  # noqa: E402
from pykernels.errors import PykernelsError  # noqa: E402

OPS = {"attention": "attention", "experts": "moe", "linear": "linear", "router": "router"}
"""The names of ``bench_gpu_NAME`` and of ``--shape``, and those of the files in ``bench/cases``."""


pytestmark = pytest.mark.benchmark(timer=gpu.CLOCK)


def entries(name: str, config: pytest.Config) -> list[Entry]:
    """Lists what ``bench_gpu_NAME`` times: the given shapes, or else the op's table.

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
        cases = entries(metafunc.function.__name__.removeprefix("bench_gpu_"), metafunc.config)
        metafunc.parametrize("entry", cases, ids=[entry.name for entry in cases])


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
    gpu.CLOCK.tell(benchmark, took)
    roofs = measure_roofs(device)
    times = Times([[(0, each) for each in took]])
    compute = roofs.compute(case.compute)
    row = figures(times, [case.nbytes], case.flops, roofs.read_gbps, compute, case.compute)
    benchmark.extra_info.update(
        gpu=gpu.name(device),
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
