"""What a call of a layer's experts costs beside its arithmetic, again and again.

A layer of a real model takes some 100 us to a few ms a token, and there are dozens of them, so tens
of microseconds each are lost speed; and a worker that the kernel takes off its core for a slice of
time (some ms) shows in the tail. So p99 and the worst of many calls are told beside the median.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pykernels.quant.split import repeat_first
from pykernels.shapes import MoEShape
from runtime.devices.cpu.routed import CpuExperts
from runtime.machine.topology import Topology
from runtime.workers.job import Job, Jobs
from runtime.workers.pool import WorkerPool, make_pool

ROUNDS = 20_000
EMBEDDED = MoEShape(E=64, H=256, I=128, topk=6)
PHYSICAL = Topology.detect().default_threads()
POOLS = {
    "1 thread": (1, True, 0),
    "every core": (PHYSICAL, True, 0),
    "every core but the driver's": (max(1, PHYSICAL - 1), False, 0),
    "two made-up nodes": (PHYSICAL, True, 2),
}


@pytest.fixture(scope="module", params=list(POOLS.values()), ids=list(POOLS))
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    threads, driver_works, nodes = request.param
    if nodes > PHYSICAL:
        pytest.skip(f"{nodes} made-up nodes need as many cores")
    topology = Topology.fake(nodes) if nodes else None
    numa = str(nodes) if nodes else "off"
    with make_pool(threads, driver_works, numa, topology) as pool:
        yield pool


def timed(benchmark, call, pool: WorkerPool) -> None:
    """One call a round; p99 and the worst in microseconds, beside the median."""
    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=500)
    times = sorted(benchmark.stats.stats.data)
    benchmark.extra_info.update(
        threads=pool.threads,
        p50_us=1e6 * times[len(times) // 2],
        p99_us=1e6 * times[len(times) * 99 // 100],
        max_us=1e6 * times[-1],
    )


def bench_ring(benchmark, pool: WorkerPool) -> None:
    """The ring alone: wake the workers, find nothing to do."""
    nothing = Jobs([Job("nothing", 0, 0, tasks=0, after=0)])
    timed(benchmark, lambda: pool.run(nothing), pool)


@pytest.mark.parametrize("T", [0, 1, 4], ids=["empty", "one token", "four tokens"])
def bench_call(benchmark, pool: WorkerPool, T: int) -> None:
    """A whole call of a small layer in cache; empty: all but the arithmetic."""
    wide = len(pool.nodes) * EMBEDDED.I
    layer = CpuExperts(MoEShape(EMBEDDED.E, EMBEDDED.H, wide, EMBEDDED.topk), "fp8", pool)
    quantize, sizes = layer.weights.fmt.quantize, ((wide, EMBEDDED.H), (EMBEDDED.H, wide))
    up, down = (quantize(torch.randn(size) / size[1] ** 0.5) for size in sizes)
    layer.load_expert(0, up, up, down)
    repeat_first(layer.weights)
    x = torch.randn(T, EMBEDDED.H).bfloat16()
    ids = torch.rand(T, EMBEDDED.E).argsort(-1)[:, : EMBEDDED.topk].contiguous()
    weights = torch.rand(T, EMBEDDED.topk)
    timed(benchmark, lambda: layer(x, ids, weights), pool)
