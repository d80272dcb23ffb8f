"""Whether drafts pay: what a step that checks them takes, and how many must be right for that."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.devices.sim.cost import Load
from runtime.devices.sim.drafts import times_as_long
from runtime.devices.sim.machine import Machine
from runtime.engine.scheduling.draft_gain import LEAST, best_number, break_even
from runtime.planning.drafts import why_no_drafts
from runtime.planning.execution import ExecutionPlan
from runtime.planning.lowerable import Lowerable

from .predict import Prediction

MOST = 8
"""Drafts of a sequence in a step, up to which steps are predicted."""
REPEATS = 0.8
"""The acceptance that drafts by prompt lookup reach where an output copies what came before, as
edits of code and quotations do: what they may gain is predicted by it."""


@dataclass(frozen=True)
class DraftForecast:
    """Steps that check drafts of each sequence.

    Attributes:
        times: as long as a step without drafts those take that check 1, 2, ...
        why_none: why the model takes no drafts, as a clause; "": it does.
    """

    times: tuple[float, ...] = ()
    why_none: str = ""

    @property
    def break_even(self) -> tuple[float | None, ...]:
        """For each number of drafts, the acceptance from which it pays; None: never."""
        return tuple(break_even(k, each) for k, each in enumerate(self.times, 1))

    @property
    def best(self) -> tuple[int, float]:
        """The number of drafts that gains most where text repeats, and what it gains."""
        return best_number(self.times, REPEATS)

    @property
    def pays(self) -> bool:
        """Whether drafts are worth checking where text repeats."""
        return self.best[1] >= LEAST

    @property
    def cost_line(self) -> str:
        """What checking drafts takes, and from when it pays."""
        if self.why_none:
            return f"none: {self.why_none}"
        k = self.best[0] or 1
        least = self.break_even[k - 1]
        from_when = "never pays" if least is None else f"pays from {least:.0%} accepted"
        one = "1 draft" if k == 1 else f"{k} drafts"
        return f"a step that checks {one} takes {self.times[k - 1]:.2f} x one without: {from_when}"

    @property
    def choice_line(self) -> str:
        """What ``--draft auto`` does then."""
        if self.why_none:
            return "--draft auto is off"
        k, gain = self.best
        at = f"where text repeats ({REPEATS:.0%} accepted)"
        if self.pays:
            return f"--draft auto checks what repeats earlier text: up to {gain:.2f} x {at}"
        return f"--draft auto is off: at most {gain:.2f} x {at}"


def draft_forecast(
    plan: ExecutionPlan, model: Lowerable, machine: Machine, load: Load, most: int = MOST
) -> DraftForecast:
    """What drafts take of a model that runs by a plan.

    Args:
        load: a decode step.
    """
    if why := why_no_drafts(plan, model):
        return DraftForecast(why_none=why)
    most = min(most, plan.sizes.tokens // load.sequences - 1)
    return DraftForecast(times_as_long(plan, model, machine, load, most))


def drafts_of(found: Prediction) -> DraftForecast:
    """What drafts take of a case that is predicted."""
    placed, wanted = found.placed, found.placed.case.wanted
    load = Load(wanted.batch, wanted.context, wanted.batch, wanted.routing)
    return draft_forecast(placed.plan, placed.case.subject.decoder, placed.case.machine, load)
