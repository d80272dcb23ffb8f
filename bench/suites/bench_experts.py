"""The fused expert FFN against the read roof, weights out of cache (SOSP'25 section 6.4's setting).

Before each timed call the plain read loop makes a pass on the same threads, so kernel and roof see
the same minute of a shared machine, and no weight survives in cache from one call to the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from pykernels.quant import FORMATS
from pykernels.shapes import MoEShape
from runtime.machine.topology import Topology
from runtime.profiling.measure import MoECase
from runtime.profiling.roofline import ReadRoof
from runtime.workers.pool import WorkerPool

SHAPES = {
    "embedded": MoEShape(E=32, H=256, I=128, topk=6),
    "deepseek-v3": MoEShape(E=32, H=7168, I=2048, topk=8),
}
ROUNDS = 60
CASES = [
    pytest.param(shape, fmt, id=f"{name}-{fmt}")
    for name, shape in SHAPES.items()
    for fmt, held in FORMATS.items()
    if shape.H % held.k_multiple == shape.I % held.k_multiple == 0
]
"""Not the superblocks of 256 in rows of 128."""


@pytest.fixture(scope="module", params=sorted({1, Topology.detect().usable}), ids="{}thr".format)
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(request.param) as pool:
        yield pool


@pytest.mark.parametrize("T", [1, 4], ids="q{}".format)
@pytest.mark.parametrize(("shape", "fmt"), CASES)
def bench_expert_ffn(benchmark, pool: WorkerPool, shape, fmt: str, T: int, kernel: str) -> None:
    case = MoECase(fmt, T, shape, pool, kernel)
    case.call()
    roof = ReadRoof(pool)
    rates: list[float] = []

    def call() -> None:
        seconds, nbytes = case.call()
        rates.append(nbytes / seconds / 1e9)

    benchmark.pedantic(call, setup=roof.each_once, rounds=ROUNDS, warmup_rounds=3)
    gbps = statistics.median(rates)
    benchmark.extra_info.update(
        threads=pool.threads,
        gbps=gbps,
        roof_gbps=roof.gbps,
        roof_share=gbps / roof.gbps,
        tflops=case.flops / statistics.median(benchmark.stats.stats.data) / 1e12,
    )
