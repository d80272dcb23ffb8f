"""Which drafts are worth checking, by how often those of an output were right of late, and by how
much longer steps with drafts take.

The prediction says how much longer, so that the same request is drafted alike on each run: a step
of several tokens adds up in another order than one of a single token, and where two tokens are as
good as equally likely, the text may depend on that. Steps that have run overrule a prediction that
is far off.
"""

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
TRUST = 1.25
"""Times that a step with drafts may take longer than predicted, or shorter, before the prediction
is given up."""
FADES = 32
"""Steps without drafts after which one more counts as if predictions were right: what was measured
while other programs used the cores does not count for ever."""
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
        # By tokens of a step with drafts, times as long as predicted; more take the next fewer's.
        self._off: dict[int, deque[float]] = {}
        self._last, self._ended, self._plain = 0, math.nan, 0

    def times_as_long(self, sequences: int, tokens: int) -> float:
        """As long as a step of so many sequences without drafts one takes that has so many tokens
        with them."""
        predicted = self._at(tokens) / self._at(sequences)
        near = max((known for known in self._off if known <= tokens), default=0)
        off = median(self._off[near]) if near else 1.0
        return max(1.0, predicted * off) if max(off, 1 / off) > TRUST else predicted

    def may_pay(self, sequences: int, acceptance: float, drafts: int) -> bool:
        """Whether any of so many drafts of one sequence is worth it in a step of ``sequences``."""
        most = acceptance / (1 - acceptance)  # tokens that ever so many drafts bring
        if most < LEAST * sequences * (self.times_as_long(sequences, sequences + 1) - 1):
            return False  # as in most steps of most texts
        return self.counts(sequences, [(acceptance, drafts)]) != [0]

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
        seconds, last = max(1e-9, ended - self._ended), self._last
        self._last, self._ended = sequences, ended
        if last != sequences:  # something else was before it
            return
        if tokens == sequences:
            self._seconds.setdefault(sequences, deque(maxlen=TIMES)).append(seconds)
            self._plain += 1
            if self._plain % FADES == 0:
                for off in self._off.values():
                    off.append(1.0)
        elif sequences in self._seconds:
            predicted = self._at(tokens) / self._at(sequences) * median(self._seconds[sequences])
            off = self._off.setdefault(tokens, deque([1.0] * BELIEF, TIMES))
            off.append(seconds / predicted)

    def pause(self) -> None:
        """A step of another kind has run since the last one."""
        self._last = 0

    def _at(self, tokens: int) -> float:
        """As long as a step of one token one takes that has so many."""
        known = self._predicted
        if tokens <= len(known):
            return known[tokens - 1]
        return known[-1] + (tokens - len(known)) * (known[-1] - known[0]) / (len(known) - 1)
