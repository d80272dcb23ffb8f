"""How fast an engine's first decode steps are, to compare with what was predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .requests.request import Request

SKIPPED = 16
"""Steps of each size before those that count: they find weights and pages where nobody has read
them yet, and workers that sleep."""
STEPS = 64
OFF = 1.2
"""Times that a measured speed may differ from a predicted one, up or down."""


@dataclass(frozen=True)
class DecodePace:
    """What decode steps took.

    Attributes:
        sequences: of each step, one token each; ``context``: of these, the mean.
        seconds: from the end of one to the end of the next, the median.
    """

    sequences: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Speed:
    """A decode step's speed, predicted and measured.

    Attributes:
        sequences, context: of the steps.
        predicted, measured: tokens a second of all sequences.
    """

    sequences: int
    context: int
    predicted: float
    measured: float

    @property
    def is_off(self) -> bool:
        """Whether they differ by more than a fifth."""
        return not 1 / OFF <= self.measured / self.predicted <= OFF

    @property
    def line(self) -> str:
        """Both, in a line."""
        beside = f"{self.sequences} sequences" if self.sequences > 1 else "one sequence"
        return (
            f"decode takes {self.measured:.1f} tok/s where {self.predicted:.1f} are predicted"
            f" ({beside} at a context of {self.context})"
        )


class Pace:
    """Times decode steps without drafts, prompts or anything else beside them, until there are
    ``STEPS`` of one size.

    Attributes:
        found: None until then.
    """

    def __init__(self) -> None:
        self.found: DecodePace | None = None
        self._seconds: dict[int, list[float]] = {}
        self._contexts: dict[int, float] = {}
        self._last, self._ended = 0, math.nan

    def add(self, decoding: Sequence[Request], ended: float) -> None:
        """A step of one token of each of these has ended."""
        count = len(decoding)
        if count == self._last:
            seconds = self._seconds.setdefault(count, [])
            seconds.append(ended - self._ended)
            if len(seconds) > SKIPPED:
                mean = sum(len(request.tokens) for request in decoding) / count
                self._contexts[count] = self._contexts.get(count, 0.0) + mean
            if len(seconds) == SKIPPED + STEPS:
                median = statistics.median(seconds[SKIPPED:])
                self.found = DecodePace(count, round(self._contexts[count] / STEPS), median)
        self._last, self._ended = count, ended

    def pause(self) -> None:
        """A step of another kind has run since the last one."""
        self._last = 0
