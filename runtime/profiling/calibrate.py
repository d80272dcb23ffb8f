"""Measures from how many tokens an expert should take the GEMM on this machine.

An expert of few tokens runs tiles, bound by reading its weights; one of many the GEMM on AMX tiles
or AVX-512 (SOSP'25 section 3.2, Figure 7). Where the two cross depends on the CPU's memory, its
product instructions and what dequantizing the format costs, so both are timed here, alternately
and with weights out of cache. ``runtime.machine.tuning`` keeps the result.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pykernels.cpu.moe.kernel import NO_GEMM
from pykernels.shapes import MoEShape

from ..machine import tuning
from ..workers.pool import WorkerPool
from .workload import RandomLayers, normal, uniform

SHAPE = MoEShape(E=8, H=7168, I=2048, topk=8)
"""DeepSeek-V3's expert sizes; with topk = E a call of n tokens gives each expert exactly n."""

TOKENS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
MORE_TOKENS = (96, 128)
"""Measured too, one by one, while no GEMM has paid: together they cost about what ``TOKENS`` do."""
PATHS = {"tiles": NO_GEMM, "gemm": 1}
"""The ``gemm_from`` that sends every expert down a path."""

_ROUNDS, _SECONDS = 7, 0.2  # of one token count: rounds at most, seconds (3 rounds at least)

Timer = Callable[[str, int], float]
"""Seconds of one call on one of ``PATHS`` with so many tokens an expert."""


@dataclass(frozen=True)
class Point:
    """Median seconds of a call with ``tokens`` an expert on both paths.

    ``ratio`` is tiles over GEMM, the median of ratios within a round: above 1 the GEMM is faster.
    """

    tokens: int
    tiles: float
    gemm: float
    ratio: float


@dataclass(frozen=True)
class Calibration:
    """What one format was calibrated to.

    Attributes:
        gemm_from: tokens of an expert from which it takes the GEMM; where that paid at no point,
            more than any that was measured.
        points: by tokens, ascending.
        regret: how much slower the choice is than the faster path at every point, the geometric
            mean: 0 where the paths cross once.
    """

    backend: str
    fmt: str
    activations: str
    threads: int
    gemm_from: int
    points: tuple[Point, ...]
    regret: float


class PathTimer:
    """A ``Timer`` of a backend on a pool, weights out of cache.

    Args:
        shape: with topk = E.
        max_tokens: the most that will be asked for.

    Raises:
        PykernelsError: not enough memory for the weights, or a backend that cannot run here.
    """

    def __init__(
        self,
        fmt: str,
        pool: WorkerPool,
        backend: str,
        activations: str = "bf16",
        shape: MoEShape = SHAPE,
        max_tokens: int = max(MORE_TOKENS),
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self._x = normal(g, max_tokens, shape.H).to(torch.bfloat16)
        self._ids = torch.arange(shape.E, dtype=torch.int64, device="cpu").repeat(max_tokens, 1)
        self._weights = uniform(g, max_tokens, shape.E)
        layers = RandomLayers(shape, fmt, [self._ids], pool)
        self._experts = {path: layers.experts(backend, activations) for path in PATHS}
        for path, gemm_from in PATHS.items():
            for experts in self._experts[path]:
                experts.gemm_from = gemm_from
        self._next = 0

    def __call__(self, path: str, tokens: int) -> float:
        start = time.perf_counter()
        self.run(path, tokens)
        return time.perf_counter() - start

    def run(self, path: str, tokens: int) -> torch.Tensor:
        """One call on the next layer; its [tokens, H] result."""
        layers = self._experts[path]
        experts, self._next = layers[self._next % len(layers)], self._next + 1
        return experts(self._x[:tokens], self._ids[:tokens], self._weights[:tokens])


def measure(timer: Timer, tokens: int) -> Point:
    """Both paths alternately, since bandwidth may drift meanwhile; the first round warms up."""
    rounds: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(rounds) < 4 or (len(rounds) <= _ROUNDS and time.perf_counter() - start < _SECONDS):
        rounds.append((timer("tiles", tokens), timer("gemm", tokens)))
    tiles, gemm = zip(*rounds[1:], strict=True)
    ratio = statistics.median(t / g for t, g in rounds[1:])
    return Point(tokens, statistics.median(tiles), statistics.median(gemm), ratio)


def crossover(points: Sequence[Point]) -> tuple[int, float]:
    """(tokens from which to take the GEMM, or ``NO_GEMM``; the regret, as in ``Calibration``).

    The threshold with the least loss over all points, where a point's loss is the log of how much
    slower the chosen path is than the other. One point that noise has turned around moves nothing.
    Of equals the highest: tiles need no packing and less memory.
    """
    logs = [math.log(point.ratio) for point in points]

    def loss(first_gemm: int) -> float:
        chosen_tiles = sum(max(0.0, x) for x in logs[:first_gemm])
        return chosen_tiles + sum(max(0.0, -x) for x in logs[first_gemm:])

    best = min(range(len(points), -1, -1), key=loss)
    regret = math.expm1(loss(best) / len(points))
    return (points[best].tokens if best < len(points) else NO_GEMM), regret


def calibrate(
    fmt: str,
    pool: WorkerPool,
    backend: str = "amx",
    activations: str = "bf16",
    timer: Timer | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Measures one format; some seconds. Nothing is written.

    Args:
        fmt: weight format.
        backend: one with a GEMM that runs here.
        activations: "bf16" or "int8"; they have thresholds of their own.
        timer: instead of this machine's kernel.
        progress: called with the share done, 0 to 1.

    Raises:
        PykernelsError: not enough memory for the weights.
    """
    timer = timer or PathTimer(fmt, pool, backend, activations)
    points: tuple[Point, ...] = ()
    for number, tokens in enumerate(TOKENS):
        progress(number / len(TOKENS))
        points += (measure(timer, tokens),)
    for tokens in MORE_TOKENS:
        if crossover(points)[0] == NO_GEMM:
            points += (measure(timer, tokens),)
    gemm_from, regret = crossover(points)
    if gemm_from == NO_GEMM:  # nothing is known beyond the last point
        gemm_from = max(tuning.default(backend, fmt, activations), points[-1].tokens + 1)
    return Calibration(backend, fmt, activations, pool.threads, gemm_from, points, regret)
