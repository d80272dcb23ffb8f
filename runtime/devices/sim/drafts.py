"""How much longer a step takes that checks drafts: its tokens read more experts than one does, by
the law of routing, but keys and values of a sequence once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planning.compile import compile
from ...planning.drafts import LEAST, best_number, break_even, why_no_drafts
from ...planning.execution import ExecutionPlan, Phase
from ...planning.lowerable import Lowerable
from .cost import Load
from .deferral import some_layers
from .machine import Machine
from .step import simulate

MOST = 8
"""Drafts of a sequence in a step, up to which steps are predicted."""
REPEATS = 0.8
"""The acceptance that drafts by prompt lookup reach where an output copies what came before, as
edits of code and quotations do: what they may gain is predicted by it. The embedded model's
continuations of 30 files of code had 3,072 of 4,046 drafts right."""


@dataclass(frozen=True)
class DraftForecast:
    """Steps that check drafts of each sequence.

    Attributes:
        times: as long as a step without drafts those take that check 1, 2, ...
        most: that a step of an engine checks of a sequence.
        why_none: why the model takes no drafts, as a clause; "": it does.
    """

    times: tuple[float, ...] = ()
    most: int = MOST
    why_none: str = ""

    @property
    def break_even(self) -> tuple[float | None, ...]:
        """For each number of drafts, the acceptance from which it pays; None: never."""
        return tuple(break_even(k, each) for k, each in enumerate(self.times, 1))

    @property
    def best(self) -> tuple[int, float]:
        """The number of drafts that gains most where text repeats, and what it gains."""
        return best_number(self.times[: self.most], REPEATS)

    @property
    def pays(self) -> bool:
        """Whether drafts are worth checking where text repeats."""
        return self.best[1] >= LEAST

    @property
    def choice(self) -> str:
        """What ``--draft auto`` does then."""
        if self.why_none:
            return f"off: {self.why_none}"
        if not self.pays:
            return "off"
        return f"--draft auto has up to {self.best[1]:.2f} x decode where text repeats itself"

    @property
    def cost(self) -> str:
        """What checking the best number of them takes, and from when it pays; "": none can be."""
        if self.why_none:
            return ""
        k = self.best[0] or 1
        least = self.break_even[k - 1]
        when = "never pays" if least is None else f"pays from {least:.0%} right ones"
        return f"a step that checks {k} takes {self.times[k - 1]:.2f} x one without and {when}"

    @property
    def line(self) -> str:
        """Both, in a line."""
        return ": ".join(filter(None, ("drafts", self.choice, self.cost)))


def draft_forecast(
    plan: ExecutionPlan, model: Lowerable, machine: Machine, load: Load, most: int
) -> DraftForecast:
    """What drafts take of a model that runs by a plan.

    Args:
        load: a decode step; ``most``: see ``DraftForecast``.
    """
    if why := why_no_drafts(plan, model):
        return DraftForecast(why_none=why)
    room = min(max(most, MOST), plan.sizes.tokens // load.sequences - 1)
    if room < 1:
        return DraftForecast(why_none="a step has no room for more tokens than one of a sequence")
    return DraftForecast(times_as_long(plan, model, machine, load, room), most)


def times_as_long(
    plan: ExecutionPlan, model: Lowerable, machine: Machine, load: Load, most: int
) -> tuple[float, ...]:
    """Seconds of steps that check 1, 2, ..., ``most`` drafts of each sequence over those of one
    that checks none.

    Args:
        load: a decode step.
    """
    some, stretch = some_layers(plan, model)

    def seconds(drafts: int) -> float:
        tokens = load.sequences * (1 + drafts)
        phase = Phase.PROMPT if drafts else Phase.DECODE
        part = compile(some, plan, phase, tokens)
        step = simulate(part, machine, replace(load, tokens=tokens, drafts=drafts))
        return step.stretched(stretch).seconds

    one = seconds(0)
    return tuple(seconds(drafts) / one for drafts in range(1, most + 1))
