"""Decides where the experts of a prompt are fastest: on the CPU, on a GPU to which they cross, or
on both."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_GAIN = 0.95
"""A step is split only if that takes at most 95 % of the next best way: it keeps both devices
busy."""
_CHANGE = 0.8
"""Factor between the shares that are tried."""
MEASURED = 64, 256, 1024
"""Tokens of the steps that say what the CPU takes, alone and with a part of the experts. Larger
steps are not split."""

Point = tuple[int, float]
"""Tokens of a step, and seconds or a share."""


@dataclass(frozen=True)
class Rates:
    """What a step costs by each way.

    Attributes:
        stream_s: seconds in which all streamed experts cross the link once.
        cpu: seconds of steps with the experts on the CPU, of two sizes or more.
        split: seconds of split steps; ``shares``: of the experts that cross in them. Of no sizes:
            nothing was split.
    """

    stream_s: float
    cpu: tuple[Point, ...]
    split: tuple[Point, ...] = ()
    shares: tuple[Point, ...] = ()

    def seconds(self, way: str, tokens: int) -> float:
        """Seconds that a step of so many tokens takes by "cpu", "split" or "stream"; infinite for a
        split of fewer or more tokens than were measured."""
        if way == "stream":
            return self.stream_s
        if way == "cpu":
            return max(0.0, _between(self.cpu, tokens))
        if not self.split or not self.split[0][0] <= tokens <= self.split[-1][0]:
            return math.inf
        return _between(self.split, tokens)

    def share(self, tokens: int) -> float:
        """Share of the experts that should cross in a split step."""
        first, last = self.shares[0][0], self.shares[-1][0]
        return _between(self.shares, min(max(tokens, first), last))


def _between(points: Sequence[Point], tokens: int) -> float:
    """Interpolates between the two points next to so many tokens; extrapolates beyond the ends."""
    i = min(max(1, bisect_left(points, (tokens, 0.0))), len(points) - 1)
    if len(points) == 1:
        return points[0][1]
    (few, low), (many, high) = points[i - 1], points[i]
    return low + (tokens - few) * (high - low) / max(1, many - few)


def choose(tokens: int, rates: Rates, split: bool = True) -> str:
    """ "cpu", "split" or "stream": by which way a step of so many tokens takes the least time.

    Args:
        split: whether it may be split.
    """
    best = min(("cpu", "stream"), key=lambda way: rates.seconds(way, tokens))
    limit = _GAIN * rates.seconds(best, tokens)
    return "split" if split and rates.seconds("split", tokens) < limit else best


def turning_point(rates: Rates, most: int) -> int:
    """The most tokens up to ``most`` of a step that the CPU computes sooner than its experts cross;
    0: there is none."""
    turn = 0
    while turn < most and choose(turn + 1, rates, split=False) == "cpu":
        turn += 1
    return turn


def split_range(rates: Rates, most: int) -> range:
    """The sizes of steps, up to ``most`` tokens, that should be split; it may be empty."""
    fitting = [tokens for tokens in range(1, most + 1) if choose(tokens, rates) == "split"]
    return range(fitting[0], fitting[-1] + 1) if fitting else range(0)


def balanced_share(
    cpu_s: float, stream_s: float, timed: Callable[[float], float]
) -> tuple[float, float]:
    """The share of the experts with which a split step is fastest, and its seconds: that with which
    the CPU would take as long as the link, and others as long as they are faster.

    Args:
        cpu_s, stream_s: seconds of the step with all experts on the CPU, and streamed.
        timed: seconds of the step with a share.
    """
    share = cpu_s / (cpu_s + stream_s)
    best = share, timed(share)
    for fewer in (True, False):
        while True:
            share = best[0] * _CHANGE if fewer else 1 - (1 - best[0]) * _CHANGE
            tried = share, timed(share)
            if tried[1] >= best[1]:
                break
            best = tried
        if best[0] < cpu_s / (cpu_s + stream_s):
            break  # fewer are better: more are not
    return best
