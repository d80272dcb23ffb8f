"""What a long load shows: share done, GB/s, time left; then that kernels are being compiled."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Callback = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after every step of a load."""


class Adder:
    """A callback for those who tell of the bytes since their last call."""

    def __init__(self, report: Callback, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def __call__(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        self._report(self._done, self._total)


_PATIENCE = 1.0  # seconds of loading before a bar appears


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{(task.speed or 0) / 1e9:.2f} GB/s")


@contextmanager
def reporting(progress: bool | Callback | None, what: str = "loading") -> Iterator[Callback]:
    """The callback of a load, for `from_pretrained(progress=...)`.

    None: a bar on stderr if that is a terminal and the load takes over a second; True: the same on
    any stderr; False: nothing; a callable: itself.
    """
    if callable(progress):
        yield progress
        return
    if not _shown(progress):
        yield lambda done, total: None
        return
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        _Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=None)
    started = time.monotonic()

    def report(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - started > _PATIENCE and done < total:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def compiling(progress: bool | Callback | None) -> Iterator[None]:
    """A line on stderr while kernels are compiled, where a bar is shown and if it takes as long."""
    if callable(progress) or not _shown(progress):
        yield
        return
    line = Console(stderr=True).status("compiling kernels, once …", spinner_style="dim")
    timer = threading.Timer(_PATIENCE, line.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        line.stop()


def _shown(progress: bool | Callback | None) -> bool:
    return progress is not False and (progress is not None or sys.stderr.isatty())
