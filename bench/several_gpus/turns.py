"""Engines of several ways that take turns at each case, so that a ratio is of calls some seconds
apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.harness.budget import NO_BAR, Bar, Budget
from bench.harness.timing.rows import Row, reason
from runtime.profiling.engine_speed import EngineTimer

from .ways import Way

Open = Callable[[Way], EngineTimer]


@dataclass(frozen=True)
class Case:
    """A call that each way times.

    Attributes:
        named: the columns that name it, beside the way.
        tokens: of it, which make its speed.
        play: runs it once; its seconds.
    """

    named: Row
    tokens: int
    play: Callable[[EngineTimer], float]


def prompt(tokens: int, **named: Any) -> Case:
    """The first token of one prompt."""
    return Case(named | {"tokens": tokens}, tokens, lambda timer: timer.prefill(tokens))


def decode(batch: int, context: int, steps: int, **named: Any) -> Case:
    """Steps of ``batch`` sequences whose caches hold ``context`` tokens."""

    def play(timer: EngineTimer) -> float:
        return sum(step.seconds for step in timer.decode(batch, context, steps))

    return Case(named | {"batch": batch}, batch * steps, play)


@dataclass(frozen=True)
class Part:
    """Ways that take turns.

    Attributes:
        open_engine: with room for all cases.
        more: further columns, of an engine's runner, the case's tokens, how many steps with prompts
            it had, and its seconds.
    """

    ways: Sequence[Way]
    cases: Sequence[Case]
    open_engine: Open
    more: Callable[[Any, int, int, float], Row] = lambda runner, tokens, steps, seconds: {}

    @property
    def plan(self) -> list[Row]:
        """The columns that name each row."""
        return [{"way": way.name, **case.named} for case in self.cases for way in self.ways]

    def work(self, rounds: int) -> float:
        """Tokens of all rounds."""
        return float(sum(case.tokens for case in self.cases) * len(self.ways) * (rounds + 1))


@dataclass
class _Player:
    """A way's engine, or why there is none; seconds of a case by round, and the ways
    (``runner.route.Route``) of its steps with prompts in the last one."""

    way: Way
    timer: EngineTimer | None = None
    why: str = ""
    rounds: list[float] = field(default_factory=list)
    routes: Counter[str] = field(default_factory=Counter)

    def turn(self, case: Case, counts: bool) -> None:
        """The case once; where it fails it is the last time."""
        if self.timer is None or self.why:
            return
        before = self.timer.engine.stats.prompt_steps
        try:
            seconds = case.play(self.timer)
        except Exception as error:
            self.why = reason(error)
            return
        self.routes = self.timer.engine.stats.prompt_steps - before
        if counts:
            self.rounds.append(seconds)


def rows(part: Part, rounds: int, budget: Budget, bar: Bar = NO_BAR) -> Iterator[Row]:
    """A row for each case and each way, as the part's ``plan`` names them; one that fails has
    ``why``. Ratios (``x_first``) are to the first way.

    All engines are there at once. Fewer rounds where the time is short, and none of a case for
    which it would not do, as far as the one before it tells.

    Args:
        rounds: that are counted, behind one that is not.

    Raises:
        PykernelsError: what the first way's engine refuses.
    """
    if not budget.fits():
        return
    with _opened(part, bar) as players:
        turn_s, last = 0.0, 1
        for case in part.cases:
            if not budget.fits(2 * turn_s * max(1.0, case.tokens / last)):
                return
            for player in players:
                player.rounds.clear()
                player.why = "" if player.timer is not None else player.why
            for number in range(rounds + 1):
                if number > 1 and not budget.fits(turn_s):
                    break
                for player in players:
                    words = (f"{value} {key}" for key, value in case.named.items())
                    bar.say(f"{player.way.name}: {', '.join(words)}")
                    player.turn(case, number > 0)
                    bar.advance(case.tokens)
                turn_s = sum(player.rounds[-1] for player in players if player.rounds)
            last = case.tokens
            for player in players:
                yield {"way": player.way.name, **case.named} | _figures(
                    player, players[0], case, part
                )


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


def _figures(player: _Player, first: _Player, case: Case, part: Part) -> Row:
    """Medians over rounds."""
    if player.why or player.timer is None:
        return {"why": player.why}
    seconds = median(player.rounds)
    row: Row = {
        "gpus": player.way.gpus,
        "seconds": round(seconds, 5),
        "seconds_least": round(min(player.rounds), 5),
        "seconds_most": round(max(player.rounds), 5),
        "rounds": len(player.rounds),
        "tok_s": round(case.tokens / seconds, 1),
        "routes": dict(player.routes),
    }
    if player is not first and first.rounds:
        pairs = zip(first.rounds, player.rounds, strict=False)
        row["x_first"] = round(median(one / own for one, own in pairs), 3)
    return row | part.more(player.timer.runner, case.tokens, player.routes.total(), seconds)
