"""How many experts of a token to defer (SOSP'25 4.2), from a machine's rates.

Deferral hides what a GPU does between two layers' experts behind the experts that the CPU has left
over. Longer contexts give the GPU more to do, so that more must be left over; among the tokens of a
batch, deferred experts of one are immediate ones of another and are read twice, so that fewer pay,
or none. Both follow from the steps themselves: each number is simulated, and the fewest that come
near the best are taken.

What is deferred changes the text, so it is one number for as long as the engine lives: a sequence
grows, and neighbours come and go, but its tokens are computed alike, and pages that it has written
stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...passes.layers import LEAST, moe_layers
from ...planning.compile import compile
from ...planning.config import LONG, ExecutionConfig
from ...planning.execution import ExecutionPlan, Phase
from ...planning.lowerable import Lowerable
from ...planning.option import SettingError
from ...planning.placement import CPU
from .cost import Load
from .machine import Machine
from .step import simulate

WORTH = 0.03
"""A part of a step's time: gains below it are within the error of a prediction, and are not worth
another text."""
LAYERS = 8
"""Of the model, whose steps are simulated; the others count as these."""


def deferral_load(
    config: ExecutionConfig, max_model_len: int, context: int = 0, batch: int = 1
) -> Load:
    """The decode step by which "auto" defers experts: as the configuration names it.

    Args:
        context, batch: where it does not; 0: half of the longest sequence, or ``LONG``.

    Raises:
        SettingError: it names a context beyond the longest sequence.
    """
    named = config.defer_load or (0, 0)
    if named[0] > max_model_len:
        hint = f"Give a context of {max_model_len} at most, or a larger max_model_len"
        raise SettingError("defer", config.defer, hint, "is of longer sequences than there can be")
    context = named[0] or context or min(LONG, max(1, max_model_len // 2))
    batch = named[1] or batch
    return Load(batch, min(context, max_model_len), batch)


def with_deferral(
    plan: ExecutionPlan, model: Lowerable, machine: Machine, load: Load
) -> ExecutionPlan:
    """The plan with the fewest deferred experts that are worth it, and why in a line.

    Args:
        plan: that leaves the number open.
        load: the decode step that counts.
    """
    found = replace(plan, deferred=0, chooses_deferral=False)
    layers = moe_layers(model.lower())
    if plan.placement.experts != CPU or len(layers) < 2:
        return found
    most = min(layer.topk for layer in layers) - LEAST
    times = step_seconds(found, model, machine, load, most)
    found = replace(found, deferred=fewest(times))
    return replace(found, decisions=(*plan.decisions, _told(times, found.deferred, load)))


def fewest(times: Sequence[float]) -> int:
    """The fewest deferred experts whose step is near the fastest.

    Args:
        times: seconds of a step by their number, from 0 on.
    """
    enough = min(times) * (1 + WORTH)
    return next(number for number, seconds in enumerate(times) if seconds <= enough)


def some_layers(plan: ExecutionPlan, model: Lowerable) -> tuple[Lowerable, float]:
    """The model with few of its layers, whose steps are compiled soon, and how many each stands
    for; with all of them where the plan goes by their numbers."""
    by_number = plan.placement.by_layer or plan.placement.kv_in_main
    return (model, 1.0) if by_number else model.thinned(LAYERS)


def step_seconds(
    plan: ExecutionPlan, model: Lowerable, machine: Machine, load: Load, most: int
) -> list[float]:
    """Seconds of a decode step with 0, 1, 2, ... experts deferred, up to ``most`` or where two in
    turn bring nothing."""
    some, stretch = some_layers(plan, model)
    times = list[float]()
    for deferred in range(most + 1):
        part = compile(some, replace(plan, deferred=deferred), Phase.DECODE, load.tokens)
        times.append(simulate(part, machine, load).stretched(stretch).seconds)
        if deferred > 1 and min(times[:-2]) <= min(times[-2:]):
            break
    return times


def _told(times: Sequence[float], deferred: int, load: Load) -> str:
    of = f"{load.sequences} sequences" if load.sequences > 1 else "one sequence"
    at = f"at a context of {load.context}, {of}"
    if deferred:
        before, after = (1e3 * times[number] for number in (0, deferred))
        return (
            f"defer: {deferred} expert{'s' * (deferred > 1)} of a token {at}: {after:.2f} ms a step"
            f" are predicted, {before:.2f} without"
        )
    gain = times[0] / min(times) - 1
    return f"defer: no experts {at}: {gain:.1%} faster steps are predicted, too little"
