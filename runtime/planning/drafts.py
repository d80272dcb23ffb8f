"""Which models can check drafts, what drafts bring, and what they cost.

A step with ``k`` drafts of a sequence yields those that are right, as far as all before them are,
and one token more. If each is right with a chance ``a`` once those before it are, that is
``1 + a + a ** 2 + ... + a ** k`` tokens (arXiv 2211.17192, equation 1). The step takes longer than
one without drafts, since its tokens choose more experts: by how much, a machine's rates predict
(``devices.sim.drafts``), and steps that have run tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .execution import ExecutionPlan
from .lowerable import Lowerable

LEAST = 1.05
"""Times the tokens for the same time from which drafts are worth it: below, a prediction is too
rough, and so is what was seen of a text."""


@dataclass(frozen=True)
class BatchInvariance:
    """Up to how many tokens of a step each one's results are the bits that it has in a step of its
    own, so that no text depends on which drafts were checked.

    Attributes:
        tokens: at most; 1: nothing is known of more.
        why: why not more, as a clause.
    """

    tokens: int = 1
    why: str = "tokens of a step are added up together"


def expected_tokens(drafts: int, acceptance: float) -> float:
    """Tokens of a step that checks so many drafts of a sequence, on average.

    Args:
        acceptance: the chance of a draft to be right, if all before it are.
    """
    return sum(acceptance**i for i in range(drafts + 1))


def break_even(drafts: int, times: float) -> float | None:
    """The acceptance from which a step with so many drafts yields as many tokens a second as one
    without; None: not even if all are right.

    Args:
        times: as long as one without drafts the step takes.
    """
    if times > 1 + drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(drafts, middle) < times else (low, middle)
    return high


def best_number(times: Sequence[float], acceptance: float) -> tuple[int, float]:
    """The number of drafts that gains most, and times as many tokens a second as without; (0, 1.0):
    none gains.

    Args:
        times: of steps with 1, 2, ... drafts, as of ``break_even``.
    """
    gains = [(expected_tokens(k, acceptance) / each, k) for k, each in enumerate(times, 1)]
    gain, k = max(gains, default=(1.0, 0))
    return (k, gain) if gain > 1 else (0, 1.0)


def why_no_drafts(plan: ExecutionPlan, model: Lowerable) -> str:
    """Why no step of a model that runs by a plan may check drafts, as a clause; "": each may."""
    if model.states:
        return f"layers of {model.name} keep a state, from which no token can be taken back"
    if plan.prefill == "stream" and plan.streaming is not None:
        return "drafts are checked as prompts are read, and all experts would cross for them"
    if plan.passes:
        return "passes rewrite decode steps, and drafts are checked by the steps of prompts"
    return ""
