"""Timing of the fused MoE call against both roofs, alternating in one process.

Memory bandwidth of a shared machine drifts within seconds, so both sides of a ratio are measured
within the same ones: rounds of a few calls alternate with one pass of the plain read loops and one
of the register-only products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from pykernels.errors import PykernelsError
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect

from ..workers.numa import AUTO
from ..workers.pool import WorkerPool, make_pool
from .roofline import Roofs
from .workload import (
    RandomLayers,
    call_of,
    check_calls,
    check_layers,
    distinct,
    normal,
    routings,
    uniform,
)

_ROUND = 0.05  # seconds of calls between two passes of the roofs
_LEAST_CALLS = 8


@dataclass(frozen=True)
class MoEMeasurement:
    """One case. Rates use 1e9 and 1e12; bytes are those of the distinct experts that a call
    touched.

    ``gbps`` is the median of every call's own bytes over its own time, ``tflops`` the FLOPs, which
    are the same for all, over the median time. ``roof_gbps`` is the median pass of the plain
    read loop, ``compute_roof_tflops`` that of products on registers alone, by the instruction
    ``compute_roof_instruction`` ("" and 0 where this CPU has none that the kernels multiply with);
    both on the same threads, between the calls. Shares are of these.
    """

    format: str
    kernel: str
    activations: str
    routing: str
    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    threads: int
    numa_nodes: int
    cpu: str
    calls: int
    distinct_experts: float
    busiest_over_mean: float
    us_median: float
    us_p10: float
    us_p90: float
    mbytes_per_call: float
    gbps: float
    tflops: float
    roof_gbps: float
    roof_share: float
    compute_roof_instruction: str
    compute_roof_tflops: float
    compute_roof_share: float

    def as_dict(self) -> dict[str, str | int | float]:
        """Flat, for one line of JSON."""
        return asdict(self)


class MoECase:
    """Random experts out of cache and routings of one skew, ready to be called again and again.

    Args:
        fmt: weight format.
        T: tokens a call.
        shape: the layer.
        pool: threads.
        kernel: a backend's name, or "auto".
        routing: one of ``workload.ROUTINGS``.
        activations: "bf16" or "int8".
        filling: called with the share of the weights that is filled, 0 to 1.

    Raises:
        PykernelsError: not enough memory for the weights or so many tokens, a kernel that cannot
            run here, no such routing, a layer too small to be timed out of cache.
    """

    def __init__(
        self,
        fmt: str,
        T: int,
        shape: MoEShape,
        pool: WorkerPool,
        kernel: str = "auto",
        routing: str = "balanced",
        activations: str = "bf16",
        filling: Callable[[float], None] | None = None,
    ) -> None:
        if T < 1:
            raise PykernelsError(f"{T} tokens", "Measure at least 1")
        resolve(kernel, fmt, detect(), activations)  # raises before any memory is filled
        check_calls(shape, T)
        check_layers(shape, fmt)
        self.T, self.shape, self.ids = T, shape, routings(shape, T, routing)
        weights = RandomLayers(shape, fmt, self.ids, pool, filling)
        self.layers = weights.experts(kernel, activations)
        g = torch.Generator().manual_seed(0)
        self.x = normal(g, T, shape.H).to(torch.bfloat16)
        self.weights = uniform(g, T, shape.topk)
        self.distinct = [distinct(ids) for ids in self.ids]
        self.bytes = [count * weights.bytes_per_expert for count in self.distinct]
        self._next = 0

    def call(self) -> tuple[float, int]:
        """One call, next layer or routing; returns (seconds, bytes of distinct experts)."""
        layer, routing = call_of(self._next, len(self.layers), len(self.ids))
        self._next += 1
        start = time.perf_counter()
        self.layers[layer](self.x, self.ids[routing], self.weights)
        return time.perf_counter() - start, self.bytes[routing]

    @property
    def flops(self) -> int:
        """Floating-point operations of a call."""
        return 2 * self.T * self.shape.topk * self.shape.weights

    @property
    def busiest_over_mean(self) -> float:
        """Tokens of the busiest expert over the mean of all experts; the mean over the routings."""
        counts = [torch.bincount(ids.flatten(), minlength=self.shape.E) for ids in self.ids]
        mean = self.T * self.shape.topk / self.shape.E
        return statistics.fmean(int(count.max()) / mean for count in counts)


def measure_moe(
    fmt: str,
    T: int,
    shape: MoEShape,
    threads: int | None = None,
    kernel: str = "auto",
    routing: str = "balanced",
    activations: str = "bf16",
    numa: str = AUTO,
    seconds: float = 4.0,
    progress: Callable[[float], None] | None = None,
    filling: Callable[[float], None] | None = None,
) -> MoEMeasurement:
    """Times fused MoE calls, weights out of cache, beside both roofs.

    Args:
        fmt: weight format.
        T: tokens a call.
        shape: the layer; so many of them are used that their weights are out of cache.
        threads: in all; None for one on each physical core.
        kernel: a backend's name, or "auto".
        routing: one of ``workload.ROUTINGS``.
        activations: "bf16" or "int8".
        numa: "auto", "off" or the number of NUMA nodes to split the experts across.
        seconds: about how long to measure.
        progress: called with the share done, 0 to 1.
        filling: before that, with the share of the weights that is filled.

    Raises:
        PykernelsError: too little memory; threads, kernel or routing that are not available.
    """
    with make_pool(threads, numa=numa) as pool:
        case = MoECase(fmt, T, shape, pool, kernel, routing, activations, filling)
        roofs = Roofs(pool, detect())
        case.call()  # compiles
        calls_a_round = max(1, round(_ROUND / case.call()[0]))
        times: list[float] = []
        rates: list[float] = []
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds or len(times) < _LEAST_CALLS:
            if progress:
                progress(min(1.0, spent / seconds))
            roofs.sample()
            for _ in range(calls_a_round):
                took, nbytes = case.call()
                times.append(took)
                rates.append(nbytes / took / 1e9)
        quantile = torch.tensor(times, dtype=torch.float64, device="cpu").quantile
        p10, median, p90 = (float(quantile(q)) * 1e6 for q in (0.1, 0.5, 0.9))
        gbps, tflops = statistics.median(rates), case.flops / median / 1e6
        name = case.layers[0].backend.name
        instruction, compute = roofs.compute(name, activations)
        return MoEMeasurement(
            format=fmt,
            kernel=name,
            activations=activations,
            routing=routing,
            tokens=T,
            hidden=shape.H,
            inter=shape.I,
            experts=shape.E,
            topk=shape.topk,
            threads=pool.threads,
            numa_nodes=len(case.layers[0].weights.slices),
            cpu=detect().cpu,
            calls=len(times),
            distinct_experts=round(statistics.fmean(case.distinct), 2),
            busiest_over_mean=round(case.busiest_over_mean, 2),
            us_median=round(median, 1),
            us_p10=round(p10, 1),
            us_p90=round(p90, 1),
            mbytes_per_call=round(statistics.fmean(case.bytes) / 1e6, 3),
            gbps=round(gbps, 2),
            tflops=round(tflops, 4),
            roof_gbps=round(roofs.read, 2),
            roof_share=round(gbps / roofs.read, 4),
            compute_roof_instruction=instruction,
            compute_roof_tflops=round(compute, 3),
            compute_roof_share=round(tflops / compute, 4) if compute else 0.0,
        )
