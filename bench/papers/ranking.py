"""Whether predictions say which of two placements or options is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from .compared import Compared

LEAST = 0.05
"""Rows nearer to each other than this have no order."""


@dataclass(frozen=True)
class Choice:
    """Two ways of the same work, of which a user takes one.

    Attributes:
        size: context of a decode, tokens of a prompt; ``one``, ``other``: places, as rows call
            them.
    """

    machine: str
    kind: str
    batch: int
    size: int
    one: str
    other: str


_CPU, _BESIDE, _GPU = "CPU", "GPU, experts on CPU", "GPU"
TEN = (
    Choice("h200-16-cores", "decode", 1, 512, _CPU, _BESIDE),
    Choice("h200-16-cores", "decode", 1, 512, _BESIDE, _GPU),
    Choice("h200-16-cores", "decode", 1, 512, _BESIDE, f"{_BESIDE}, 1 deferred"),
    Choice("h200-16-cores", "decode", 1, 512, f"{_BESIDE}, 1 deferred", f"{_BESIDE}, 2 deferred"),
    Choice("h200-16-cores", "decode", 1, 512, _BESIDE, f"{_BESIDE}, 13 slots"),
    Choice("h200-16-cores", "decode", 8, 512, _CPU, _BESIDE),
    Choice("h200-16-cores", "decode", 8, 512, _BESIDE, f"{_BESIDE}, 2 deferred"),
    Choice("h100-16-cores", "prompt", 1, 64, f"{_BESIDE}, split", f"{_BESIDE}, stream"),
    Choice("h100-16-cores", "prompt", 1, 512, f"{_BESIDE}, cpu", f"{_BESIDE}, split"),
    Choice("h100-16-cores", "prompt", 1, 4096, f"{_BESIDE}, cpu", f"{_BESIDE}, stream"),
)
"""Choices of somebody who runs Qwen3-30B's shapes, 24 layers in q4_k, which were measured."""


@dataclass(frozen=True)
class Ranked:
    """A choice with how many times as fast ``other`` is as ``one``."""

    choice: Choice
    measured: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the order is predicted."""
        return (self.measured > 1) == (self.predicted > 1)


def ten(found: Sequence[Compared]) -> Iterator[Ranked]:
    """Those of ``TEN`` that were measured, by the medians of all their runs."""
    for choice in TEN:
        sides = [_speed(found, choice, place) for place in (choice.one, choice.other)]
        (measured, predicted), (other_measured, other_predicted) = sides
        if measured and other_measured:
            yield Ranked(choice, other_measured / measured, other_predicted / predicted)


def _speed(found: Sequence[Compared], choice: Choice, place: str) -> tuple[float, float]:
    """Returns the measured and the predicted speed of a side; (0, 0): nobody measured it."""
    wanted = choice.machine, choice.kind, choice.batch, choice.size, place
    rows = [
        each
        for each in found
        if (each.row.arch, each.row.fmt, each.row.layers) == ("qwen3-30b", "q4_k", 24)
        and (each.row.machine, each.row.kind, each.row.batch, each.row.context) == wanted[:4]
        and each.row.place == place
    ]
    if not rows:
        return 0.0, 0.0
    measured = median(each.row.measured for each in rows)
    predicted = median(each.predicted for each in rows)
    if choice.kind == "decode":
        return 1 / measured, 1 / predicted
    return measured, predicted


def ranked(found: Sequence[Compared]) -> tuple[int, int]:
    """How many pairs of rows are predicted in their order, and how many pairs there are: of rows
    that differ in where or with which options alone, and by ``LEAST`` at least."""
    right = pairs = 0
    for one, other in combinations((each for each in found if each.counts), 2):
        a, b = one.row, other.row
        alike = a.machine, a.kind, a.arch, a.fmt, a.layers, a.batch, a.context
        if alike != (b.machine, b.kind, b.arch, b.fmt, b.layers, b.batch, b.context):
            continue
        if a.place == b.place or abs(a.measured / b.measured - 1) < LEAST:
            continue
        pairs += 1
        right += (a.measured > b.measured) == (one.predicted > other.predicted)
    return right, pairs
