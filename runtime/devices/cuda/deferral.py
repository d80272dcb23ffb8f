"""How many experts to defer beside this GPU, from a few measured steps (SOSP'25 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ...passes.defer import fewest_deferred
from ...passes.layers import moe_layers
from ...program import Program
from ...workers.job import Job

_STEPS = 8


def measured_deferral(program: Program, jobs: tuple[Job, ...], step: Callable[[], None]) -> int:
    """The fewest deferred experts that keep the CPU busy in decode steps of one token.

    Args:
        program: a decode step's, of one token, nothing deferred.
        jobs: of the CPU's half: each layer's experts, opened by the GPU's flag.
        step: runs it.
    """
    layers = {layer.experts.name: layer.topk for layer in moe_layers(program)}
    if not layers:
        return 0
    computing, waiting = list[float](), list[float]()
    for _ in range(_STEPS):
        step()
        ended = None
        for job in jobs:
            begun, complete = job.times
            if job.opens and ended is not None:
                waiting.append((begun - ended) / 1e9)
            if job.name in layers and job.opens == 0:
                ended = complete
                computing.append((complete - begun) / 1e9)
    if not waiting:
        return 0
    topk = min(layers.values())
    # A layer's experts may be two jobs: one that lays their inputs out, one that computes.
    layer_s = sum(computing) / (_STEPS * len(layers))
    return fewest_deferred(topk, layer_s / topk, median(waiting))
