"""The gated delta rule on the CPU against the read roof, at the sizes of Qwen3-Next-80B.

A decode step reads and writes a state of 2 MiB a sequence and layer; a pass over the roof's buffer
before each call leaves none of it in cache. A prompt is bound by its multiply-adds, three a number
of the state and token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pykernels.cpu.delta_net.args import DELTA_RULE, plan
from pykernels.cpu.delta_net.kernel import make_delta_rule
from pykernels.cpu.ops.serial import Record, counted
from pykernels.cpu.vectors import width
from pykernels.target import detect
from runtime.machine.topology import Topology
from runtime.profiling.roofline import ReadRoof
from runtime.workers.job import Job, Jobs
from runtime.workers.pool import WorkerPool

HK, HV, D = 16, 32, 128
ROUNDS = 40


@pytest.fixture(scope="module", params=sorted({1, Topology.detect().usable}), ids="{}thr".format)
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(request.param) as pool:
        yield pool


def record_of(S: int, length: int, threads: int) -> Record:
    """Makes the arguments of a step of S sequences that go on, each with so many tokens."""
    kernel, T = make_delta_rule(D, D, width(detect())), S * length
    qk, v, g = torch.randn(2, T, HK, D), torch.randn(T, HV, D), -torch.rand(T, HV)
    return Record(
        DELTA_RULE,
        count_at=counted(S),
        starts=np.arange(0, T, length),
        lengths=np.full(S, length),
        slots=np.arange(S),
        past=np.ones(S, np.int64),
        q=qk[0],
        q_stride=4 * HK * D,
        k=qk[1],
        k_stride=4 * HK * D,
        v=v,
        v_stride=4 * HV * D,
        g=g,
        g_stride=4 * HV,
        beta=torch.rand(T, HV),
        beta_stride=4 * HV,
        HK=HK,
        HV=HV,
        group=HV // HK,
        scale=D**-0.5,
        eps=1e-6,
        state=torch.randn(S, HV, D, D),
        slot_bytes=4 * HV * D * D,
        out=torch.empty(T, HV, D),
        out_stride=4 * HV * D,
        columns=plan(S, HV, D, kernel.strip, threads).columns,
    )


@pytest.mark.parametrize(
    ("S", "length"),
    [(1, 1), (8, 1), (1, 4), (1, 512)],
    ids=["decode", "8 sequences", "4 tokens", "prompt of 512"],
)
def bench_delta_rule(benchmark, pool: WorkerPool, S: int, length: int) -> None:
    kernel, record = make_delta_rule(D, D, width(detect())), record_of(S, length, pool.threads)
    jobs = Jobs([Job("delta rule", kernel.run.address, record.address, kernel.setup.address)])
    roof = ReadRoof(pool)
    benchmark.pedantic(lambda: pool.run(jobs), setup=roof.each_once, rounds=ROUNDS, warmup_rounds=3)
    seconds = statistics.median(benchmark.stats.stats.data)
    gbps = S * 2 * 4 * HV * D * D / seconds / 1e9  # read once and written once
    benchmark.extra_info.update(
        threads=pool.threads,
        gbps=gbps,
        roof_gbps=roof.gbps,
        roof_share=gbps / roof.gbps,
        tflops=S * length * HV * 3 * D * D * 2 / seconds / 1e12,
    )
