"""Timing of the fused MoE call against the read roof, in one process and in turns.

Memory bandwidth of a shared machine drifts within seconds, so a ratio is only worth something if
both
sides saw the same minute: rounds of a few calls alternate with one pass of the plain read loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from pykernels.errors import PykernelsError
from pykernels.quant.split import repeat_first
from pykernels.shapes import MoEShape
from pykernels.target import detect

from .experts import RoutedExperts
from .nodes import AUTO
from .pool import Pool, make_pool
from .roofline import ReadRoof
from .topology import Topology

_ROUTINGS = 64
_CACHES = 4  # weights in rotation are at least so many times the last-level cache


@dataclass(frozen=True)
class MoEMeasurement:
    """One case. Rates use 1e9 and 1e12; bytes are those of the distinct experts that a call
    touched.

    ``gbps`` and ``tflops`` are medians over calls; ``roof_gbps`` is the median pass of the plain
    read loop on the same threads, run between the calls; ``roof_share`` is their ratio.
    """

    format: str
    kernel: str
    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    threads: int
    cpu: str
    calls: int
    us_median: float
    us_p10: float
    us_p90: float
    mbytes_per_call: float
    gbps: float
    tflops: float
    roof_gbps: float
    roof_share: float
    numa_nodes: int = 1

    def as_dict(self) -> dict[str, str | int | float]:
        """Flat, for one line of JSON."""
        return asdict(self)


class MoECase:
    """Random experts out of cache, random balanced routing, ready to be called again and again.

    Args:
        fmt: weight format.
        T: tokens a call.
        shape: the layer.
        pool: threads.
        kernel: a backend's name, or "auto".

    Raises:
        PykernelsError: not enough memory for the weights, or a kernel that cannot run here.
    """

    def __init__(self, fmt: str, T: int, shape: MoEShape, pool: Pool, kernel: str = "auto") -> None:
        if T < 1:
            raise PykernelsError(f"{T} tokens", "Measure at least 1")
        nbytes = RoutedExperts.bytes_needed(shape, fmt)
        layers = max(1, -(-_CACHES * detect().l3 // nbytes))
        available = Topology.detect().memory_available
        if layers * nbytes > 0.9 * available:
            raise PykernelsError(
                f"{shape.E} experts in {fmt} need {layers * nbytes / 2**30:.1f} GiB,"
                f" {available / 2**30:.1f} GiB are free",
                "Lower --experts; the weights only have to be larger than the cache",
            )
        self.T, self.shape = T, shape
        self.layers = [RoutedExperts(shape, fmt, pool, kernel) for _ in range(layers)]
        for layer in self.layers:
            _fill(layer)
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(T, shape.H, generator=g).to(torch.bfloat16)
        self.ids = [
            torch.rand(T, shape.E, generator=g).argsort(-1)[:, : shape.topk].contiguous()
            for _ in range(_ROUTINGS)
        ]
        self.weights = torch.rand(T, shape.topk, generator=g)
        self.bytes = [
            ids.unique().numel() * self.layers[0].weights.bytes_per_expert for ids in self.ids
        ]
        self._next = 0

    def call(self) -> tuple[float, int]:
        """One call, next routing and layer; returns (seconds, bytes of distinct experts)."""
        i, self._next = self._next, self._next + 1
        experts, ids = self.layers[i % len(self.layers)], self.ids[i % _ROUTINGS]
        start = time.perf_counter()
        experts(self.x, ids, self.weights)
        return time.perf_counter() - start, self.bytes[i % _ROUTINGS]

    @property
    def flops(self) -> int:
        """Floating-point operations of a call."""
        return 2 * self.T * self.shape.topk * self.shape.weights


def _fill(layer: RoutedExperts) -> None:
    """One random expert, quantized and packed; the others are copies of its bytes."""
    packed, H, I = layer.weights, layer.shape.H, layer.shape.I  # noqa: E741
    g = torch.Generator().manual_seed(0)
    sizes = ((I, H), (I, H), (H, I))
    layer.load_expert(
        0, *(packed.fmt.quantize(torch.randn(N, K, generator=g) / K**0.5) for N, K in sizes)
    )
    repeat_first(packed)


def measure_moe(
    fmt: str,
    T: int,
    shape: MoEShape,
    threads: int | None = None,
    kernel: str = "auto",
    numa: str = AUTO,
    seconds: float = 4.0,
    progress: Callable[[float], None] | None = None,
) -> MoEMeasurement:
    """Times fused MoE calls, weights out of cache, beside the read roof.

    Args:
        fmt: weight format.
        T: tokens a call.
        shape: the layer; its E experts should outweigh the cache, or several layers take turns.
        threads: of the pool; None for every usable core.
        kernel: a backend's name, or "auto".
        numa: "auto", "off" or the number of NUMA nodes to split the experts across.
        seconds: about how long to measure.
        progress: called with the share done, 0 to 1.

    Raises:
        PykernelsError: too little memory, threads or kernel that this machine has not.
    """
    with make_pool(threads, numa=numa) as pool:
        case = MoECase(fmt, T, shape, pool, kernel)
        roof = ReadRoof(pool)
        first, _ = case.call()  # also compiles
        first, _ = case.call()
        calls_a_round = max(1, round(0.05 / first))
        times: list[float] = []
        rates: list[float] = []
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds or len(times) < 8:
            if progress:
                progress(min(1.0, spent / seconds))
            roof.each_once()
            for _ in range(calls_a_round):
                took, nbytes = case.call()
                times.append(took)
                rates.append(nbytes / took / 1e9)
        quantile = torch.tensor(times, dtype=torch.float64).quantile
        p10, median, p90 = (float(quantile(q)) * 1e6 for q in (0.1, 0.5, 0.9))
        gbps = float(torch.tensor(rates).median())
        roof_gbps = roof.gbps
        return MoEMeasurement(
            format=fmt,
            kernel=case.layers[0].backend.name,
            tokens=T,
            hidden=shape.H,
            inter=shape.I,
            experts=shape.E,
            topk=shape.topk,
            threads=pool.threads,
            cpu=detect().cpu,
            calls=len(times),
            us_median=round(median, 1),
            us_p10=round(p10, 1),
            us_p90=round(p90, 1),
            mbytes_per_call=round(sum(case.bytes) / len(case.bytes) / 1e6, 3),
            gbps=round(gbps, 2),
            tflops=round(case.flops / median / 1e6, 4),
            roof_gbps=round(roof_gbps, 2),
            roof_share=round(gbps / roof_gbps, 4),
            numa_nodes=len(case.layers[0].weights.slices),
        )
