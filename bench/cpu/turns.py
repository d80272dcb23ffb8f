"""Everybody in turn: a few calls of each engine, then the roofs, then again.

Memory bandwidth of a shared machine drifts by a third within minutes. A ratio is therefore taken
round by round, between turns a fraction of a second apart, and the median round is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.peers.client import PeerMissing
from pykernels.target import Target
from runtime.pool import WorkerPool
from runtime.roofline import ReadRoof, compute_roof

Calls = list[tuple[int, float]]
"""(routing, seconds) of each call of a turn."""


class Player(Protocol):
    """Ours or a peer's process: whoever can take a turn."""

    def turn(self, seconds: float, most: int = 1000) -> Calls: ...


class Roofs:
    """The roofs of a pool, sampled once a round."""

    def __init__(self, pool: WorkerPool, target: Target) -> None:
        self._pool, self._read = pool, ReadRoof(pool)
        wanted = {"avx512": "avx512bf16", "amx": "amx-bf16"}
        self._compute: dict[str, list[float]] = {
            name: [] for name, feature in wanted.items() if feature in target.isa
        }
        self._read.each_once()  # warms up
        self._read.seen = {loop: [] for loop in self._read.seen}

    def sample(self) -> None:
        """One pass of each."""
        self._read.each_once()
        for isa, seen in self._compute.items():
            seen.append(compute_roof(self._pool, isa))

    @property
    def read(self) -> float:
        """GB/s: the median pass of the fastest plain loop."""
        return self._read.gbps

    @property
    def compute(self) -> dict[str, float]:
        """TFLOP/s of register-only bf16 products, by instruction set; empty without AVX512-BF16."""
        return {isa: statistics.median(seen) for isa, seen in self._compute.items()}


@dataclass
class Seen:
    """What one player did: its rounds, or why it fell out."""

    rounds: list[Calls] = field(default_factory=list)
    why: str = ""

    @property
    def seconds(self) -> list[float]:
        """The median call of each round."""
        return [statistics.median(took for _, took in calls) for calls in self.rounds]

    @property
    def median(self) -> float:
        """Seconds of the median call of all."""
        return statistics.median(took for calls in self.rounds for _, took in calls)

    def rate(self, work: Sequence[float]) -> float:
        """Median over calls of ``work[routing]`` a second."""
        return statistics.median(work[i] / took for calls in self.rounds for i, took in calls)


def alternate(
    players: dict[str, Player], roofs: Roofs | None, rounds: int, seconds: float
) -> dict[str, Seen]:
    """``rounds`` times: a turn of each player, one after the other, never two at once.

    A first round is not counted. A peer that fails drops out with its reason.
    """
    seen = {name: Seen() for name in players}
    for number in range(rounds + 1):
        if roofs:
            roofs.sample()
        for name, player in players.items():
            if seen[name].why:
                continue
            try:
                calls = player.turn(seconds if number else 0.0)
            except PeerMissing as error:
                seen[name] = Seen(why=str(error))
                continue
            if number:
                seen[name].rounds.append(calls)
    return seen


def speedup(ours: Seen, peer: Seen) -> float:
    """How many times faster ours is: the median over rounds of the ratio within a round."""
    pairs = zip(peer.seconds, ours.seconds, strict=True)
    return statistics.median(theirs / mine for theirs, mine in pairs)
