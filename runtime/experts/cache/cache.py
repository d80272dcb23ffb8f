"""The experts in a GPU's slots: what a step may read of them, and what is on its way there.

Nothing waits for an expert. What one step's routers chose is counted when it ends, and swaps are
planned while the next one runs. Before the step behind it, the table forgets the experts that
leave; then their slots are filled, while steps go on and the CPU computes what has no slot; once a
slot is filled, the table tells the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .policy import NOBODY, CachePolicy, Scores, plan


class Move(NamedTuple):
    """An expert on its way into a slot of its layer."""

    layer: int
    expert: int
    slot: int


class Filler(Protocol):
    """Copies experts into slots that no step reads."""

    def begin(self, moves: Sequence[Move]) -> None:
        """Queues copies and returns at once; a step may be running."""

    def finished(self) -> Sequence[Move]:
        """The moves whose copies have ended since the last call. No step runs."""

    def close(self) -> None:
        """Ends what was queued."""


class Chosen(NamedTuple):
    """What a router chose in a step."""

    layer: int
    """Its row of the cache's tables."""
    ids: NDArray[np.integer]
    """[tokens, topk]; negative: none."""


@dataclass
class CacheStats:
    """Counts of steps in which every sequence had one token.

    Attributes:
        choices: experts that tokens chose; ``hits``: those that were in slots.
        distinct: experts that steps took, each once a step; ``missed``: those of them that were in
            no slot, which the CPU read.
        swaps: experts that came into slots, in all steps.
    """

    choices: int = 0
    hits: int = 0
    distinct: int = 0
    missed: int = 0
    swaps: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of the choices that were in slots."""
        return self.hits / max(1, self.choices)


class ExpertCache:
    """The slots of all layers.

    Args:
        slots: of each layer.
        experts: of a layer.
        filler: None: slots are full when the next step begins (a simulation).
        burst: most swaps a step until the slots hold what a prompt has asked for.
        table: int32 [L, E] for ``table``; None: an array of its own.

    Attributes:
        table: int32 [L, E], the slot of each expert as the next step reads it, -1: none.
        stats: counts since the beginning.
        in_flight: experts that are to come, or on their way.
    """

    def __init__(
        self,
        slots: Sequence[int],
        experts: int,
        policy: CachePolicy,
        filler: Filler | None = None,
        burst: int = 64,
        table: NDArray[np.int32] | None = None,
    ) -> None:
        L = len(slots)
        self.policy, self.burst = policy, max(burst, policy.swaps * L)
        self.table: NDArray[np.int32] = np.empty((L, experts), np.int32) if table is None else table
        self.table[:] = -1
        self.stats = CacheStats()
        self.scores = Scores(policy, L, experts)
        self._filler: Filler = BetweenSteps() if filler is None else filler
        self._empty: list[list[int]] = [list(range(n))[::-1] for n in slots]  # empty slots
        self._slot: NDArray[np.int32] = np.full((L, experts), -1, np.int32)  # or the one to be
        self._coming = np.zeros((L, experts), np.bool_)
        self._leaving: list[tuple[int, int]] = []  # (layer, expert), when the step has ended
        self._waiting: list[Move] = []  # into their slots
        self.in_flight = 0
        self._filling = False

    def before_step(self) -> bool:
        """Brings the table up to date; no step runs. Whether it has changed."""
        done = self._filler.finished()
        changed = bool(done or self._leaving)
        for layer, expert in self._leaving:
            self.table[layer, expert] = -1
        self._leaving.clear()
        for layer, expert, slot in done:
            self.table[layer, expert] = slot
            self._coming[layer, expert] = False
        self.in_flight -= len(done)
        self.stats.swaps += len(done)
        if self._waiting:
            self._filler.begin(self._waiting)
            self._waiting = []
        return changed

    def count(
        self,
        chosen: Iterable[Chosen],
        tokens: int,
        decode: bool,
        table: NDArray[np.int32] | None = None,
    ) -> None:
        """Counts a step that has ended.

        Args:
            tokens: of the step; ``decode``: whether every sequence had one of them.
            table: as that step read it; None: as it is now.
        """
        L, E = self.table.shape
        keys = [layer * E + ids.ravel()[ids.ravel() >= 0] for layer, ids in chosen]
        flat = np.concatenate(keys) if keys else np.zeros(0, np.int64)
        counts = np.bincount(flat, minlength=L * E).reshape(L, E)
        self.scores.add(counts, tokens)
        if not decode:
            self._filling = True
            return
        here = (self.table if table is None else table) >= 0
        self.stats.choices += len(flat)
        self.stats.hits += int((counts * here).sum())
        self.stats.distinct += int(np.count_nonzero(counts))
        self.stats.missed += int(np.count_nonzero(counts * ~here))

    def plan(self) -> None:
        """Decides on swaps by what was counted; a step may be running."""
        L, E = self.table.shape
        policy = self.policy
        each, most = policy.swaps if policy.fixed else E, policy.swaps * L
        if self._filling:
            each, most = E, self.burst
        if (limit := most - self.in_flight) < 1:
            return  # what is on its way takes as long as the steps: no more
        free = np.array([len(empty) for empty in self._empty], np.int64)
        stays = (self._slot >= 0) & ~self._coming
        margin = 0.0 if policy.recent else policy.margin
        swaps = plan(self.scores.values, stays, self._slot < 0, free, each, limit, margin)
        self._filling = self._filling and len(swaps) == limit
        at_once = []
        for layer, expert, leaves in swaps:
            if leaves == NOBODY:
                slot = self._empty[layer].pop()
                at_once.append(Move(layer, expert, slot))
            else:
                slot = int(self._slot[layer, leaves])
                self._slot[layer, leaves] = -1
                self._leaving.append((layer, leaves))
                self._waiting.append(Move(layer, expert, slot))
            self._slot[layer, expert], self._coming[layer, expert] = slot, True
        self.in_flight += len(swaps)
        if at_once:  # no table names these slots
            self._filler.begin(at_once)

    def close(self) -> None:
        """Ends what is on its way."""
        self._filler.close()


class BetweenSteps:
    """Fills slots when it is asked whether they are full.

    Args:
        fill: one slot.
    """

    def __init__(self, fill: Callable[[Move], object] = lambda move: None) -> None:
        self._fill, self._moves = fill, list[Move]()

    def begin(self, moves: Sequence[Move]) -> None:
        self._moves += moves

    def finished(self) -> Sequence[Move]:
        done, self._moves = self._moves, []
        for move in done:
            self._fill(move)
        return done

    def close(self) -> None:
        self._moves.clear()
