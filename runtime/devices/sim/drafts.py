"""How much longer a step takes that checks drafts: its tokens read more experts than one does, by
the law of routing, but keys and values of a sequence once."""

from __future__ import annotations

from dataclasses import replace

from ...planning.compile import compile
from ...planning.execution import ExecutionPlan, Phase
from ...planning.lowerable import Lowerable
from .cost import Load
from .machine import Machine
from .step import simulate

LAYERS = 4
"""Of the model, whose steps are simulated; the others count as these."""


def times_as_long(
    plan: ExecutionPlan, model: Lowerable, machine: Machine, load: Load, most: int
) -> tuple[float, ...]:
    """Seconds of steps that check 1, 2, ..., ``most`` drafts of each sequence over those of one
    that checks none.

    Args:
        load: a decode step.
    """
    by_number = plan.placement.by_layer or plan.placement.kv_in_main  # of layers: all are needed
    some, stretch = (model, 1.0) if by_number else model.thinned(LAYERS)

    def seconds(drafts: int) -> float:
        tokens = load.sequences * (1 + drafts)
        phase = Phase.PROMPT if drafts else Phase.DECODE
        part = compile(some, plan, phase, tokens)
        step = simulate(part, machine, replace(load, tokens=tokens, drafts=drafts))
        return step.stretched(stretch).seconds

    one = seconds(0)
    return tuple(seconds(drafts) / one for drafts in range(1, most + 1))
