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
from runtime.profiling.roofline import Roofs

Calls = list[tuple[int, float]]
"""(routing, seconds) of each call of a turn."""


class Player(Protocol):
    """Ours or a peer's process: whoever can take a turn."""

    def turn(self, seconds: float, most: int = 1000) -> Calls: ...


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
