"""How a run ends: Ctrl-C and SIGTERM alike, and what its results say of that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch, which a start of any command would wait for
    from bench.harness.timing.rows import Row

KILLED = "the run was killed"
"""What results in a file say unless they are written again."""


def ending(missing: Sequence[Any], why: str = "") -> dict[str, Any]:
    """``complete``: whether every row was measured; ``missing``: which were not; ``why``: what
    ended the run, "" where it came to its end."""
    return {"complete": not missing and not why, "missing": list(missing), "why": why}


def why_ended(error: BaseException) -> str:
    """An exception that ended a run as one line."""
    from bench.harness.timing.rows import reason

    return "it was interrupted" if isinstance(error, KeyboardInterrupt) else reason(error)


def not_measured(plan: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Rows of a plan that have no figures.

    Args:
        plan: of each row the columns that name it.
        rows: with these columns; one that failed has ``why``.
    """
    timed = [row for row in rows if "why" not in row]
    return [named for named in plan if not any(named.items() <= row.items() for row in timed)]


def end_on_signals() -> None:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, once: peers are ended, rows are kept."""

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end the writing
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """``end_on_signals`` for a block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    end_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
