"""Which experts come into the slots of a layer and which leave them: pure functions of counts.

SMOE's IV-E has a trained predictor of the next token's experts beside the counts by which experts
leave. Here both are one score of each expert, of what routers have chosen: a swap pays where the
one that comes has a higher score than the one that leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykernels.errors import PykernelsError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

POLICIES = ("lfu", "lfu-fixed", "lru", "lru-fixed")
"""What a policy compares experts by, and how it deals a step's swaps out to the layers."""
NOBODY = -1
_TIE = 1e-9
"""Less than two scores differ by, and more than they are rounded by."""


class Swap(NamedTuple):
    """An expert that comes into a layer's slots, in the place of one that leaves; ``NOBODY``: a
    free slot."""

    layer: int
    expert: int
    leaves: int


@dataclass(frozen=True)
class CachePolicy:
    """How the experts in slots are chosen.

    Attributes:
        name: one of ``POLICIES``. "lfu" keeps those that were chosen most often, of late above all;
            "lru" those that were chosen last. "-fixed": at most ``swaps`` in each layer a step
            (Fixed-N); else so many a layer on average, where they gain the most (Adaptive).
        swaps: N.
        half_life: tokens after which a choice counts half, for "lfu".
        margin: choices that an expert must have more than the one that leaves, for "lfu": copying
            it reads as many bytes as computing it once on the CPU.

    Raises:
        PykernelsError: there is no such policy, or a number is out of its range.
    """

    name: str = "lfu"
    swaps: int = 1
    half_life: float = 128.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise PykernelsError(
                f"there is no expert cache policy {self.name!r}", f"Use {', '.join(POLICIES)}"
            )
        if self.swaps < 0 or self.half_life <= 0 or self.margin < 0:
            raise PykernelsError(f"{self} has a number out of its range", "Give 0 swaps or more")

    @property
    def recent(self) -> bool:
        """Whether experts are compared by when they were chosen, not by how often."""
        return self.name.startswith("lru")

    @property
    def fixed(self) -> bool:
        """Whether every layer has as many swaps a step."""
        return self.name.endswith("-fixed")


class Scores:
    """What the experts of all layers are compared by; 0 was never chosen.

    Attributes:
        values: float64 [L, E].
    """

    def __init__(self, policy: CachePolicy, layers: int, experts: int) -> None:
        self._policy, self._step = policy, 0
        self.values: Floats = np.zeros((layers, experts), np.float64)

    def add(self, counts: NDArray[np.int64], tokens: int) -> None:
        """Counts one step.

        Args:
            counts: [L, E], how many of the step's tokens chose each expert.
        """
        if tokens < 1:
            return
        self._step += 1
        if self._policy.recent:  # of those of one step, the more often chosen one is ahead
            np.copyto(self.values, self._step + counts / (tokens + 1), where=counts > 0)
        else:
            self.values *= 0.5 ** (tokens / self._policy.half_life)
            self.values += counts


def plan(
    scores: Floats,
    stays: Flags,
    absent: Flags,
    free: NDArray[np.int64],
    each: int,
    limit: int,
    margin: float = 0.0,
) -> list[Swap]:
    """The swaps that add up to the most: no other ones, as few or fewer, leave the slots with a
    higher sum of scores, each leaving expert counted with ``margin`` more.

    Args:
        scores: [L, E].
        stays: [L, E], the experts in slots that may leave them.
        absent: [L, E], those that may come.
        free: [L], empty slots.
        each: most swaps in one layer; ``limit``: in all.

    Returns:
        The most useful one first.
    """
    come = np.where(absent & (scores > 0), scores, -np.inf)
    go = np.where(stays, scores, np.inf)
    # Most steps change nothing, or few layers: only those are sorted.
    least = np.where(free > 0, 0.0, go.min(1) + margin)
    (rows,) = np.nonzero(come.max(1) > least)
    each = min(each, scores.shape[1])
    if not len(rows) or each < 1 or limit < 1:
        return []
    come, go, open_ = come[rows], go[rows], free[rows, None]
    best = _first(-come, each)  # [layers, each], highest score first
    worst = _first(go, each)  # lowest first
    at = np.arange(each)[None]
    leaves = np.take_along_axis(worst, np.maximum(at - open_, 0), 1)
    lost = np.where(at < open_, 0.0, np.take_along_axis(go, leaves, 1) + margin)
    gain = np.take_along_axis(come, best, 1) - lost  # falls along a row
    order = np.argsort(-gain, axis=None, kind="stable")[: min(limit, int((gain > 0).sum()))]
    return [
        Swap(int(rows[i]), int(best[i, j]), NOBODY if j < open_[i, 0] else int(leaves[i, j]))
        for i, j in zip(*np.unravel_index(order, gain.shape), strict=True)
    ]


def _first(keys: Floats, count: int) -> NDArray[np.int64]:
    """[rows, count] of each row, where its smallest keys are, in order; of equal ones the first."""
    keys = keys + _TIE * np.arange(keys.shape[1])
    if 2 * count >= keys.shape[1]:
        return np.argsort(keys, axis=1)[:, :count]
    indices = np.argpartition(keys, count - 1, axis=1)[:, :count]
    return np.take_along_axis(indices, np.argsort(np.take_along_axis(keys, indices, 1), axis=1), 1)
