"""By which law tokens choose their experts, and so how many different ones a step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pykernels.errors import PykernelsError


@dataclass(frozen=True)
class Routing:
    """How unevenly tokens choose experts.

    Attributes:
        zipf: the r-th most chosen expert is chosen r ** -zipf as often as the first; 0: all alike.
        counts: instead, choices of each expert as a trace has them, of any layer's size.
    """

    zipf: float = 0.0
    counts: tuple[float, ...] = ()

    def distinct(self, E: int, topk: float, tokens: float, first: int = 0, last: int = -1) -> float:
        """Different experts that tokens take, drawn independently.

        Args:
            topk: experts of a token, of all E; ``first``, ``last``: of those from rank ``first`` to
                before ``last`` alone; -1: to the end.
        """
        each = self.taken(E, topk)[first : None if last < 0 else last]
        return sum(1 - (1 - q) ** tokens for q in each)

    def rows(
        self, E: int, topk: float, tokens: float, first: int = 0, last: int = -1
    ) -> tuple[tuple[float, float], ...]:
        """Returns for each expert the chance that one token takes it, with 1, and that several do,
        with how many then do; the arguments are ``distinct``'s.

        Few tokens mostly take an expert alone: its time is another kernel's than that of the mean.
        """
        found = list[tuple[float, float]]()
        for q in self.taken(E, topk)[first : None if last < 0 else last]:
            one = min(1.0, tokens * q * (1 - q) ** (tokens - 1)) if q < 1 or tokens == 1 else 0.0
            several = 1 - (1 - q) ** tokens - one
            found += [(one, 1.0)] if one > 0 else []
            found += [(several, (q * tokens - one) / several)] if several > 1e-9 else []
        return tuple(found)

    def share(self, E: int, topk: float, first: int = 0, last: int = -1) -> float:
        """The part of all choices that falls on these experts."""
        each = self.taken(E, topk)[first : None if last < 0 else last]
        return sum(each) / topk if topk else 0.0

    def fullest(self, E: int, topk: float, parts: int) -> float:
        """The part of all choices that is expected to fall on the fullest of so many parts of the
        experts, which are alike in size and not dealt by how often they are chosen."""
        each, mean = self.taken(E, topk), topk / E
        spread = math.sqrt(sum((q - mean) ** 2 for q in each) * (1 - 1 / parts) / parts)
        most = 0.68 * math.sqrt(2 * math.log(parts))  # of normal numbers, of two 0.80
        return min(1.0, 1 / parts + most * spread / topk)

    def slowest(self, E: int, topk: float, cores: int) -> float:
        """How much more work than all on average a core has, where each has some experts from the
        beginning, dealt from the most to the least chosen."""
        each = self.taken(E, topk)
        return max(sum(each[core::cores]) for core in range(cores)) * min(cores, E) / topk

    def taken(self, E: int, topk: float) -> tuple[float, ...]:
        """By rank, the chance that a token takes an expert; they add up to ``topk``."""
        return _taken(E, topk, self.zipf, self.counts)


@lru_cache(maxsize=4096)
def _taken(E: int, topk: float, zipf: float, counts: tuple[float, ...]) -> tuple[float, ...]:
    weights = [(r + 1) ** -zipf for r in range(E)]
    if counts:
        ranked = sorted(counts, reverse=True)  # of another E: read at the same quantile
        weights = [ranked[r * len(ranked) // E] for r in range(E)]
    found, rest, left = [0.0] * E, topk, sum(weights)
    for r, weight in enumerate(weights):
        found[r] = min(1.0, rest * weight / left) if left > 0 else 0.0
        rest, left = rest - found[r], left - weight
    return tuple(found)


def parse_routing(text: str) -> Routing:
    """A law as it is typed: "even", or "zipf:1.2".

    Raises:
        PykernelsError: it is neither.
    """
    name, _, value = text.partition(":")
    if name == "even" and not value:
        return Routing()
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if name != "zipf" or not 0 <= found <= 10:
        raise PykernelsError(f"{text!r} is no law of routing", "Give even, or zipf:1.0")
    return Routing(found)


def from_counts(counts: Sequence[float]) -> Routing:
    """The law that a trace has: choices of each expert."""
    return Routing(counts=tuple(counts))
