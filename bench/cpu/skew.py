"""Skewed routing of the same FLOPs: what it costs, and what the dynamic queue saves of it."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from pykernels.shapes import MoEShape
from runtime.profiling.workload import ROUTINGS, RandomLayers, distinct, routings
from runtime.workers.pool import WorkerPool

from .cases import Settings
from .ours import Ours
from .rows import Row
from .static import StaticOurs
from .turns import alternate, speedup

PER_EXPERT, FEW = 64, 8
"""Tokens: an expert on average, where products bound a call; of a call, where reading does."""


def skew_shape(shape: MoEShape) -> MoEShape:
    """A quarter of the experts for each token: more of them would leave a router no choice."""
    return MoEShape(shape.E, shape.H, shape.I, max(1, shape.E // 4))


def skew(fmt: str, kernel: str, shape: MoEShape, pool: WorkerPool, settings: Settings) -> list[Row]:
    """Every routing of ``workload.ROUTINGS`` on the queue and on static shares, in turns."""
    shape = skew_shape(shape)
    tokens = PER_EXPERT * shape.E // shape.topk, FEW
    return [row for T in tokens for row in _skew_of(T, fmt, kernel, shape, pool, settings)]


def _skew_of(
    T: int, fmt: str, kernel: str, shape: MoEShape, pool: WorkerPool, settings: Settings
) -> list[Row]:
    """The rows of calls of T tokens; their layers are gone when it returns."""
    ids = {kind: routings(shape, T, kind, count=8) for kind in ROUTINGS}
    weights = RandomLayers(shape, fmt, ids["one"])
    players: dict[str, Any] = {}
    for kind in ROUTINGS:
        for schedule, make in (("dynamic", Ours), ("static", StaticOurs)):
            player = players[f"{kind} {schedule}"] = make(weights, kernel)
            player.prepare(T, ids[kind])
    seen = alternate(players, None, settings.rounds, settings.turn)
    base = seen["balanced dynamic"]
    experts = {kind: statistics.fmean(distinct(one) for one in ids[kind]) for kind in ROUTINGS}
    rows: list[Row] = []
    for name, timed in seen.items():
        kind, schedule = name.split()
        times = speedup(base, timed)
        rows.append(
            {
                "format": fmt,
                "backend": kernel,
                "tokens": T,
                "topk": shape.topk,
                "experts": shape.E,
                "threads": pool.threads,
                "routing": kind,
                "schedule": schedule,
                "active": round(experts[kind], 2),
                "busiest": round(_busiest(ids[kind], shape.E), 2),
                "ms": round(timed.median * 1e3, 3),
                "against_balanced": round(times, 3),
                "against_balanced_a_byte": round(times * experts["balanced"] / experts[kind], 3),
            }
        )
    return rows


def _busiest(ids: list[torch.Tensor], E: int) -> float:
    """Slots of the most crowded expert over the mean of all."""
    counts = [torch.bincount(one.flatten(), minlength=E) for one in ids]
    return statistics.fmean(int(c.max()) * E / int(c.sum()) for c in counts)
