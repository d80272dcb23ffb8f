"""Ours in its places and the peers in turns, round after round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from bench.harness.budget import NO_BAR, Bar, Budget
from bench.harness.timing.rows import reason
from bench.peers.client import PeerMissing
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from .ours import Ours, roof
from .places import Place
from .players import Case, Engines, Played, Player, Rates
from .settings import Settings

SECONDS = 1200.0
"""The time limit of a peer's process, if that of the run is not sooner."""
_LEAST = 30.0
"""Seconds of a process that was begun in time, at least."""


class Turns:
    """The turns of one model in one format.

    Args:
        players: peers, those of the first place before the others.
        whys: why peers are missing, by the names of their columns.

    Attributes:
        mine, theirs: of each place and of each peer's column, by the number of the round.
        engines: of the places that have played.
        failed: why a place has no turns, or no further ones; ``whys`` why a peer's column has none.
        roofs: GB/s that as many threads read, before the first round and after each.
        late: whether time was over for some turn.
    """

    def __init__(
        self,
        name: str,
        ours: Ours,
        places: Sequence[Place],
        players: Sequence[Player],
        whys: dict[str, str],
        settings: Settings,
        budget: Budget,
        bar: Bar = NO_BAR,
    ) -> None:
        self.name, self.ours, self.settings = name, ours, settings
        self.mine: dict[str, dict[int, Rates]] = {place.name: {} for place in places}
        columns = [column for player in players for column in player.names]
        self.theirs: dict[str, dict[int, dict[Case, Played]]] = {each: {} for each in columns}
        self.engines: dict[str, Engines] = {}
        self.failed: dict[str, str] = {}
        self.whys, self.roofs, self.late = whys, list[float](), False
        self._groups = _groups(places, players)
        self._budget, self._bar = budget, bar

    def play(self) -> Iterator[None]:
        """Yields after each turn."""
        self._read_roof()
        for group in self._groups:
            took = [0.0] * len(group)
            for number in range(self.settings.rounds):
                for i, one in enumerate(group):
                    if self._is_in(one, took[i]):
                        took[i] = self._turn(one, number)
                    self._bar.advance(1)
                    yield
                if not self.late:
                    self._read_roof()
        self._bar.say(f"{self.name}: all turns done")
        yield

    def close(self) -> None:
        """Ends our engines; the workers stay."""
        for engines in self.engines.values():
            engines.close()

    def _read_roof(self) -> None:
        self._bar.say(f"{self.name}: read roof, {len(self.roofs) + 1}")
        self.roofs.append(roof(self.settings.threads))

    def _is_in(self, one: Place | Player, took: float) -> bool:
        """Whether one has a turn: it has not failed, and there is time for what its last one took;
        where it never had one, the reason is put down."""
        if isinstance(one, Place):
            names, reasons, turns = [one.name], self.failed, dict[str, object](self.mine)
        else:
            names, reasons, turns = list(one.names), self.whys, dict[str, object](self.theirs)
        if all(name in reasons for name in names):
            return False
        if self._budget.fits(took):
            return True
        self.late = True
        reasons |= {name: self._budget.why for name in names if not turns[name]}
        return False

    def _turn(self, one: Place | Player, number: int) -> float:
        """The seconds of a turn, without those in which an engine is made."""
        return self._ours(one, number) if isinstance(one, Place) else self._theirs(one, number)

    def _ours(self, place: Place, number: int) -> float:
        s, began = self.settings, time.perf_counter()
        try:
            if place.name not in self.engines:
                self._bar.say(f"{self.name}: {place.name or 'ours'}: loading, compiling")
                execution = ExecutionConfig(kernel=s.kernel, **place.options)
                make = partial(self.ours.timer, execution=execution)
                self.engines[place.name] = Engines(make, s.cases)
            self._bar.say(f"{self.name}: round {number + 1}: {place.name or 'ours'}")
            began = time.perf_counter()
            self.mine[place.name][number] = self.engines[place.name].turn(s.cases)
        except PykernelsError as error:
            self.failed[place.name] = reason(error)
        return time.perf_counter() - began

    def _theirs(self, player: Player, number: int) -> float:
        self._bar.say(f"{self.name}: round {number + 1}: {', '.join(player.names)}")
        began = time.perf_counter()
        seconds = min(SECONDS, max(_LEAST, self._budget.left))
        try:
            for name, played in player.turn(self.settings.cases, seconds).items():
                self.theirs[name][number] = played
        except PeerMissing as error:
            self.whys |= dict.fromkeys(player.names, str(error))
        return time.perf_counter() - began


def _groups(places: Sequence[Place], players: Sequence[Player]) -> list[list[Place | Player]]:
    """Those that take turns with each other, one group after the other: beside a GPU first ours
    with its experts on the CPU and llama.cpp's decodes and prompts there, which a run that is cut
    short should have; else there is one."""
    first = [place for place in places if place.options.get("experts") == "cpu"]
    rest = [place for place in places if place not in first]
    if not first:
        return [[*rest, *players]]
    return [[first[0], *players[:2], *first[1:]], [*rest, *players[2:]]]
