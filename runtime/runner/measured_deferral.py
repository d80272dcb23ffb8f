"""How many experts to defer beside this GPU, from a few measured steps (SOSP'25 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from ..passes.defer import fewest_deferred
from ..passes.layers import moe_layers
from ..program import Program
from ..workers.busy import BusyTimes
from ..workers.job import Job

_STEPS = 8


def measured_deferral(program: Program, jobs: Sequence[Job], step: Callable[[], None]) -> int:
    """The fewest deferred experts that keep the CPU busy in decode steps of one token.

    Args:
        program: a decode step's, of one token, nothing deferred.
        jobs: of the CPU's half: each layer's experts, opened by the GPU's flag.
        step: runs it.
    """
    layers = moe_layers(program)
    if len(layers) < 2:
        return 0
    topk = min(layer.topk for layer in layers)
    times = []
    for _ in range(_STEPS):
        step()
        times.append(BusyTimes.of(jobs))
    experts = sum(layer.topk * layer.share for layer in layers)  # that a token takes on the CPU
    expert_s = median(time.busy for time in times) / experts
    return fewest_deferred(topk, expert_s, median(wait for time in times for wait in time.waits))
