"""Which drafts are worth checking, by how often those of an output were right of late, and by how
much longer steps with drafts take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from ...planning.drafts import LEAST

TIMES = 15
"""Steps of a kind that count, the last ones."""
BELIEF = 3
"""Steps with drafts that a prediction counts as."""
UNKNOWN = 0.5
"""By how much of a step another draft lengthens it, where nothing is predicted."""


class DraftPolicy:
    """Says how many drafts of each sequence a step checks.

    Args:
        predicted: times as long as a step without drafts those take that check 1, 2, ... of one
            sequence; empty: nobody knows.
    """

    def __init__(self, predicted: Sequence[float] = ()) -> None:
        self._predicted = [1.0, *(predicted or (1 + UNKNOWN,))]
        self._seconds: dict[int, deque[float]] = {}  # of steps without drafts, by sequences
        # By tokens of a step with drafts, times as much longer than predicted.
        self._longer: dict[int, deque[float]] = {}
        self._last, self._ended = 0, math.nan

    def times_as_long(self, sequences: int, tokens: int) -> float:
        """As long as a step of so many sequences without drafts one takes that has so many tokens
        with them."""
        longer = self._longer.get(tokens)
        return 1 + self._extra(sequences, tokens) * (1.0 if longer is None else median(longer))

    def counts(self, sequences: int, offered: Sequence[tuple[float, int]]) -> list[int]:
        """How many drafts are checked, so that most tokens are drawn in the same time.

        Args:
            sequences: of the step; ``offered``: of some of them, the acceptance and how many
                drafts there are.
        """
        chances = (
            (rate**place, i)
            for i, (rate, count) in enumerate(offered)
            for place in range(1, count + 1)
        )
        found, best, most, brought = [0] * len(offered), [0] * len(offered), 1.0, 0.0
        for number, (chance, i) in enumerate(sorted(chances, reverse=True), 1):
            brought += chance
            found[i] += 1
            times = self.times_as_long(sequences, sequences + number)
            gain = (1 + brought / sequences) / times
            if gain > most and brought >= LEAST * sequences * (times - 1):
                most, best = gain, found.copy()
        return best

    def timed(self, sequences: int, tokens: int, ended: float) -> None:
        """A step of nothing but so many sequences and their drafts has ended, behind another step.

        Args:
            tokens: those of the sequences and their drafts.
        """
        seconds, last = ended - self._ended, self._last
        self._last, self._ended = sequences, ended
        if last != sequences:  # something else was before it
            return
        if tokens == sequences:
            self._seconds.setdefault(sequences, deque(maxlen=TIMES)).append(seconds)
        elif sequences in self._seconds:
            longer = max(0.0, seconds / median(self._seconds[sequences]) - 1)
            found = self._longer.setdefault(tokens, deque([1.0] * BELIEF, TIMES))
            found.append(longer / self._extra(sequences, tokens))

    def pause(self) -> None:
        """A step of another kind has run since the last one."""
        self._last = 0

    def _extra(self, sequences: int, tokens: int) -> float:
        """What a step with drafts takes more, in parts of one without, as predicted."""
        return max(0.01, self._at(tokens) / self._at(sequences) - 1)

    def _at(self, tokens: int) -> float:
        """As long as a step of one token one takes that has so many."""
        known = self._predicted
        if tokens <= len(known):
            return known[tokens - 1]
        return known[-1] + (tokens - len(known)) * (known[-1] - known[0]) / (len(known) - 1)
