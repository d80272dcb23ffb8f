"""Measures what this machine should choose: so far, from how many tokens an expert takes the GEMM.

An expert of few tokens runs tiles, bound by reading its weights; one of many the GEMM on
AMX tiles or AVX-512 again (SOSP'25 section 3.2, Figure 7). Where the two cross depends on the CPU's
memory, its product instructions and what decoding the format costs, so both are timed here, in
turns, weights out of cache, and ``runtime.machine.tuning`` keeps the result.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from pykernels.cpu.moe.kernel import NEVER
from pykernels.shapes import MoEShape
from pykernels.target import detect

from ..machine import tuning
from ..machine.tuning import Choices
from ..workers.pool import WorkerPool
from .workload import RandomLayers

SHAPE = MoEShape(E=8, H=7168, I=2048, topk=8)
"""DeepSeek-V3's expert sizes; with topk = E a call of n tokens gives each expert exactly n."""

TOKENS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
LATER = (96, 128)
"""Measured too, one by one, while no GEMM has paid: together they cost about what ``TOKENS`` do."""
PATHS = {"tiles": NEVER, "gemm": 1}
"""The ``gemm_from`` that sends every expert down a path."""

_ROUNDS, _SECONDS = 7, 0.2  # of one token count: rounds at most, seconds (3 rounds at least)


class Timer(Protocol):
    """Whatever can run a call of ``tokens`` an expert on one of ``PATHS``."""

    def seconds(self, path: str, tokens: int) -> float:
        """Of one call."""


@dataclass(frozen=True)
class Point:
    """Median seconds of a call with ``tokens`` an expert on both paths, and their ratio.

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
        gemm_from: beyond the last point where the GEMM paid in none: not below that.
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
    """A backend's two paths on this pool, weights out of cache.

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
        max_tokens: int = max(LATER),
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self._x = torch.randn(max_tokens, shape.H, generator=g).to(torch.bfloat16)
        self._ids = torch.arange(shape.E).repeat(max_tokens, 1)
        self._weights = torch.rand(max_tokens, shape.E, generator=g)
        layers = RandomLayers(shape, fmt, [self._ids], pool)
        self._experts = {path: layers.experts(backend, activations) for path in PATHS}
        for path, gemm_from in PATHS.items():
            for experts in self._experts[path]:
                experts.choices = Choices(gemm_from=gemm_from)
        self._next = 0

    def seconds(self, path: str, tokens: int) -> float:
        """Of one call."""
        start = time.perf_counter()
        self.call(path, tokens)
        return time.perf_counter() - start

    def call(self, path: str, tokens: int) -> torch.Tensor:
        """One call on the next layer; its [tokens, H] result."""
        layers = self._experts[path]
        experts, self._next = layers[self._next % len(layers)], self._next + 1
        return experts(self._x[:tokens], self._ids[:tokens], self._weights[:tokens])


def time_paths(
    timer: Timer,
    tokens: Sequence[int] = TOKENS,
    progress: Callable[[float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Point, ...]:
    """Both paths at each token count, in turns; the first round only warms up.

    Args:
        progress: called with the share done, 0 to 1.
    """
    points = []
    for number, n in enumerate(tokens):
        if progress:
            progress(number / len(tokens))
        rounds: list[tuple[float, float]] = []
        start = clock()
        while len(rounds) < 4 or (len(rounds) <= _ROUNDS and clock() - start < _SECONDS):
            rounds.append((timer.seconds("tiles", n), timer.seconds("gemm", n)))
        tiles, gemm = zip(*rounds[1:], strict=True)
        ratio = statistics.median(t / g for t, g in rounds[1:])
        points.append(Point(n, statistics.median(tiles), statistics.median(gemm), ratio))
    return tuple(points)


def crossover(points: Sequence[Point]) -> tuple[int, float]:
    """(tokens from which to take the GEMM, or ``NEVER``; the regret, as in ``Calibration``).

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
    return (points[best].tokens if best < len(points) else NEVER), regret


def calibrate(
    fmt: str,
    pool: WorkerPool,
    backend: str = "amx",
    activations: str = "bf16",
    timer: Timer | None = None,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Measures one format; some seconds. Nothing is written.

    Args:
        fmt: weight format.
        backend: one with a GEMM that runs here.
        activations: "bf16" or "int8"; they have thresholds of their own.
        timer: instead of this machine's kernel.

    Raises:
        PykernelsError: not enough memory for the weights.
    """
    timer = timer or PathTimer(fmt, pool, backend, activations)
    points = time_paths(timer, progress=progress)
    for n in LATER:
        if crossover(points)[0] < NEVER:
            break
        points += time_paths(timer, (n,))
    gemm_from, regret = crossover(points)
    if gemm_from == NEVER:  # more than this nobody has seen
        default = tuning.default(backend, fmt, activations).gemm_from
        gemm_from = max(default, points[-1].tokens + 1)
    return Calibration(backend, fmt, activations, pool.threads, gemm_from, points, regret)


def keep(found: Calibration) -> Path:
    """Writes it for this CPU; experts that are made from now on read it. Returns the file.

    Raises:
        PykernelsError: the file cannot be written.
    """
    how = {
        "threads": found.threads,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "points": [asdict(point) for point in found.points],
    }
    name = tuning.key(found.backend, found.fmt, found.activations)
    return tuning.write(detect().cpu, name, Choices(gemm_from=found.gemm_from), how)
