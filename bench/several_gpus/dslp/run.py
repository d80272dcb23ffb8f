"""Streamed prompts on the first GPU and on all of them, in turns; what crosses each link, and from
one GPU to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.harness.timing.rows import Row, reason
from runtime.profiling.engine_speed import EngineTimer

from ..budget import NO_BAR, Bar, Budget
from ..crossing import crossing
from ..ways import Way

Open = Callable[[Way], EngineTimer]


@dataclass
class _Player:
    """A way's engine, or why there is none; seconds of a prompt by round."""

    way: Way
    timer: EngineTimer | None = None
    why: str = ""
    rounds: list[float] = field(default_factory=list)

    def turn(self, tokens: int, counts: bool) -> None:
        """One prompt; where it fails it is the last."""
        if self.timer is None or self.why:
            return
        try:
            seconds = self.timer.prefill(tokens)
        except Exception as error:
            self.why = reason(error)
            return
        if counts:
            self.rounds.append(seconds)


@dataclass(frozen=True)
class Part:
    """Ways that take turns over prompts.

    Attributes:
        layers: of the model that they run.
        open_engine: with room for the longest prompt.
    """

    ways: Sequence[Way]
    lengths: Sequence[int]
    layers: int
    open_engine: Open

    @property
    def plan(self) -> list[Row]:
        """The columns that name each row."""
        return [
            {"way": way.name, "layers": self.layers, "tokens": tokens}
            for tokens in self.lengths
            for way in self.ways
        ]


def rows(part: Part, rounds: int, budget: Budget, bar: Bar = NO_BAR) -> Iterator[Row]:
    """A row for each length and each way, as the part's ``plan`` names them; one that fails has
    ``why``.

    All engines are there at once, and take turns. Fewer rounds where the time is short, and none of
    a length for which it would not do.

    Args:
        rounds: that are counted, behind one that is not.

    Raises:
        PykernelsError: what the first way's engine refuses.
    """
    if not budget.fits():
        return
    with _opened(part, bar) as players:
        turn_s, last = 0.0, 1
        for tokens in part.lengths:
            if not budget.fits(2 * turn_s * max(1.0, tokens / last)):
                return
            for player in players:
                player.rounds.clear()
                player.why = "" if player.timer is not None else player.why
            for number in range(rounds + 1):
                if number > 1 and not budget.fits(turn_s):
                    break
                for player in players:
                    bar.say(f"{player.way.name}: {tokens} tokens")
                    player.turn(tokens, number > 0)
                    bar.advance(tokens)
                turn_s, last = sum(each.rounds[-1] for each in players if each.rounds), tokens
            for player in players:
                row = {"way": player.way.name, "layers": part.layers, "tokens": tokens}
                yield row | _figures(player, players[0], tokens)


@contextmanager
def _opened(part: Part, bar: Bar) -> Iterator[list[_Player]]:
    players: list[_Player] = []
    try:
        for way in part.ways:
            bar.say(f"{way.name}: compiling")
            player = _Player(way)
            try:
                with way.flagged():
                    player.timer = part.open_engine(way)
            except Exception as error:
                if not players:
                    raise
                player.why = reason(error)
            players.append(player)
        yield players
    finally:
        for player in players:
            if player.timer is not None:
                player.timer.close()
                player.timer.runner.close()


def _figures(player: _Player, first: _Player, tokens: int) -> Row:
    """Medians; rates use 1e9 bytes."""
    if player.why or player.timer is None:
        return {"why": player.why}
    seconds = median(player.rounds)
    row: Row = {
        "gpus": player.way.gpus,
        "seconds": round(seconds, 5),
        "seconds_least": round(min(player.rounds), 5),
        "seconds_most": round(max(player.rounds), 5),
        "rounds": len(player.rounds),
        "tok_s": round(tokens / seconds, 1),
    }
    if player is not first and first.rounds:
        pairs = zip(first.rounds, player.rounds, strict=False)
        row["x_first"] = round(median(one / own for one, own in pairs), 3)
    return row | _crossed(player.timer.runner, tokens, seconds)


def _crossed(runner: Any, tokens: int, seconds: float) -> Row:
    found = crossing(runner, tokens)
    row: Row = {"steps": found.steps, "streamed_steps": found.streamed}
    if not found.links:
        return row
    total = sum(found.links.values())
    row |= {
        "link_bytes": total,
        "link_gbps": round(total / seconds / 1e9, 2),
        "link_gbps_each": [round(each / seconds / 1e9, 2) for each in found.links.values()],
        "between_bytes": found.between,
        "between_gbps": round(found.between / seconds / 1e9, 2),
    }
    streaming = runner.plan.streaming
    if streaming is not None and streaming.link_bytes_per_s:
        row["link_roof_gbps"] = round(streaming.link_bytes_per_s / 1e9, 2)
    return row
