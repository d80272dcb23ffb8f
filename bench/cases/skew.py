"""Skewed routing of the same FLOPs: what it costs, and what dealing out tasks saves of it.

balanced: as many tokens for every expert; zipf: the expert of rank r drawn with weight 1 / (r + 1);
one: all tokens take the same experts. With few tokens skew means fewer distinct experts to read:
compare GB/s there.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from bench.harness.settings import Settings
from bench.harness.timing.rows import Row, against, figures
from bench.harness.timing.turns import alternate
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.profiling.roofline import Roofs
from runtime.profiling.workload import ROUTINGS, RandomLayers, distinct, routings
from runtime.workers.pool import WorkerPool

from .ours import Ours, StaticOurs

PER_EXPERT, FEW = 64, 8
"""Tokens: an expert on average, where products bound a call; of a call, where reading does."""


def skew_shape(shape: MoEShape) -> MoEShape:
    """A quarter of the experts for each token: more of them would leave a router no choice."""
    return MoEShape(shape.E, shape.H, shape.I, max(1, shape.E // 4))


def skew(
    fmt: str, kernel: str, shape: MoEShape, pool: WorkerPool, settings: Settings, target: Target
) -> list[Row]:
    """Every routing of ``workload.ROUTINGS`` dealt out and on static shares, in turns."""
    shape = skew_shape(shape)
    tokens = PER_EXPERT * shape.E // shape.topk, FEW
    roofs = Roofs(pool, target)
    return [row for T in tokens for row in _skew_of(T, fmt, kernel, shape, roofs, settings)]


def _skew_of(
    T: int, fmt: str, kernel: str, shape: MoEShape, roofs: Roofs, settings: Settings
) -> list[Row]:
    """The rows of calls of T tokens; their layers are gone when it returns.

    ``x_balanced`` is the time of balanced routing, dealt out, over the row's; ``x_static`` that of
    static shares under the same routing.
    """
    ids = {kind: routings(shape, T, kind, count=8) for kind in ROUTINGS}
    weights = RandomLayers(shape, fmt, ids["one"])
    players: dict[str, Any] = {}
    for kind in ROUTINGS:
        for schedule, make in (("dynamic", Ours), ("static", StaticOurs)):
            player = players[f"{kind} {schedule}"] = make(weights, kernel)
            player.prepare(T, ids[kind])
    times = alternate(players, settings.rounds, settings.turn, roofs.sample)
    roof, flops = roofs.compute(kernel)[1] or None, 2 * T * shape.topk * shape.weights
    rows: list[Row] = []
    for name, timed in times.items():
        kind, schedule = name.split()
        touched = [distinct(one) for one in ids[kind]]
        peers = {"balanced": times["balanced dynamic"]}
        if schedule == "dynamic":
            peers["static"] = times[f"{kind} static"]
        row: Row = {
            "op": f"skew {fmt}",
            "name": f"{kind} {schedule}",
            "backend": kernel,
            "format": fmt,
            "tokens": T,
            "topk": shape.topk,
            "experts": shape.E,
            "routing": kind,
            "schedule": schedule,
            "active": round(statistics.fmean(touched), 2),
            "busiest": round(_busiest(ids[kind], shape.E), 2),
        }
        nbytes = [weights.bytes_per_expert * n for n in touched]
        rows.append(row | figures(timed, nbytes, flops, roofs.read, roof) | against(timed, peers))
    return rows


def _busiest(ids: list[torch.Tensor], E: int) -> float:
    """Slots of the expert with the most over the mean of all."""
    counts = [torch.bincount(one.flatten(), minlength=E) for one in ids]
    return statistics.fmean(int(c.max()) * E / int(c.sum()) for c in counts)
