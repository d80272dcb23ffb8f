"""How the CPU and a GPU wait for each other, from a few measured decode steps (SOSP'25 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from ...passes.layers import moe_layers
from ...planning.gpu.with_rates import DecodeTimes
from ...program import Program
from ...workers.busy import BusyTimes
from ...workers.job import Job

_STEPS = 8


def decode_times(program: Program, jobs: Sequence[Job], step: Callable[[], None]) -> DecodeTimes:
    """The times of decode steps of one token.

    Args:
        program: of the step, nothing deferred; it has layers of routed experts.
        jobs: of the CPU's half: each layer's experts, opened by the GPU's flag.
        step: runs it.
    """
    times = []
    for _ in range(_STEPS):
        step()
        times.append(BusyTimes.of(jobs))
    experts = sum(layer.topk * layer.share for layer in moe_layers(program))  # of a token
    return DecodeTimes(
        median(time.busy for time in times) / experts,
        median(wait for time in times for wait in time.waits),
    )
