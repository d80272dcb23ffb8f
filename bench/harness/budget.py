"""How long a run may take, and a bar that says how long it will."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from model.cli.shared.common import err

if TYPE_CHECKING:
    from rich.console import Console

Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0.01,
        metavar="M",
        help="Begin no part beyond this time, loading included; rows so far are kept, and the"
        " others named.",
        show_default="no limit",
    ),
]


class Budget:
    """The time of a run, from when this object is made.

    Args:
        minutes: None: no limit.
    """

    def __init__(
        self, minutes: float | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._minutes, self._clock = minutes, clock
        self._began = clock()

    def fits(self, seconds: float = 0.0) -> bool:
        """Whether a part that takes so long would end in time."""
        return seconds < self.left

    @property
    def left(self) -> float:
        """Seconds until the limit, below 0 behind it."""
        if self._minutes is None:
            return inf
        return 60 * self._minutes - (self._clock() - self._began)

    @property
    def why(self) -> str:
        """The reason why rows are missing."""
        return f"--minutes {self._minutes:g} were too few"


class Bar:
    """Work that is done, on a terminal, with the time that is left."""

    def __init__(self, say: Callable[[str], None], advance: Callable[[float], None]) -> None:
        self._say, self._advance = say, advance

    def say(self, what: str) -> None:
        """Shows what is done now."""
        self._say(what)

    def advance(self, work: float) -> None:
        """So much of the total is done."""
        self._advance(work)


NO_BAR = Bar(lambda what: None, lambda work: None)


@contextmanager
def bar(total: float) -> Iterator[Bar]:
    """A bar that is gone behind the block; where no terminal shows it, a line for each part, once,
    with the seconds since the first one.

    Args:
        total: work in all, in any unit.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Left

    console = err()
    if not console.is_terminal:
        yield Bar(_lines(console), lambda work: None)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        Left(),
        console=console,
        transient=True,
    ) as shown:
        task = shown.add_task("", total=total)
        yield Bar(
            lambda what: shown.update(task, description=what),
            lambda work: shown.advance(task, work),
        )


def _lines(console: Console) -> Callable[[str], None]:
    began, said = time.perf_counter(), set[str]()

    def say(what: str) -> None:
        if what not in said:
            said.add(what)
            console.print(f"{time.perf_counter() - began:.0f} s: {what}", markup=False)

    return say
