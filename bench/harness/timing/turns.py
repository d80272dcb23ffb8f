"""Everybody in turn: a few calls of each engine, then the roofs, then again.

Memory bandwidth of a shared machine drifts by a third within minutes, and a GPU's clock by what ran
before. A ratio is therefore taken round by round, between turns a fraction of a second apart, and
the median round is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from bench.peers.client import PeerMissing

Calls = list[tuple[int, float]]
"""(input set, seconds) of each call of a turn."""


class Player(Protocol):
    """Runs what is timed: a call of ours, or a peer's process."""

    def turn(self, seconds: float, most: int = 1000) -> Calls:
        """About ``seconds`` of calls, at least one and at most ``most``."""
        ...


@dataclass
class Times:
    """What one player did: its rounds, or why it fell out."""

    rounds: list[Calls] = field(default_factory=list)
    why: str = ""

    @property
    def calls(self) -> list[float]:
        """Seconds of every call."""
        return [took for calls in self.rounds for _, took in calls]

    @property
    def medians(self) -> list[float]:
        """The median call of each round."""
        return [median(took for _, took in calls) for calls in self.rounds]

    @property
    def median(self) -> float:
        """Seconds of the median call of all."""
        return median(self.calls)

    def rate(self, work: Sequence[float]) -> float:
        """Median over calls of ``work[input set]`` a second."""
        return median(work[i] / took for calls in self.rounds for i, took in calls)


def alternate(
    players: Mapping[str, Player],
    rounds: int | Mapping[str, int],
    seconds: float = 0.0,
    between: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """``rounds`` times: a turn of each player, one after the other, never two at once.

    A first round is not counted. A peer that fails drops out with its reason.

    Args:
        rounds: of all, or of each: a slow one may have fewer.
        between: called before each round; it samples the roofs.
    """
    times = {name: Times() for name in players}
    wanted = dict.fromkeys(players, rounds) if isinstance(rounds, int) else dict(rounds)
    for number in range(max(wanted.values(), default=0) + 1):
        between()
        for name, player in players.items():
            if times[name].why or number > wanted[name]:
                continue
            try:
                calls = player.turn(seconds if number else 0.0)
            except PeerMissing as error:
                times[name] = Times(why=str(error))
                continue
            if number:
                times[name].rounds.append(calls)
    return times


def speedup(ours: Times, peer: Times) -> float:
    """How many times faster ours is: the median over rounds of the ratio within a round."""
    pairs = zip(peer.medians, ours.medians, strict=False)  # a slow peer has fewer rounds
    return median(theirs / mine for theirs, mine in pairs)
