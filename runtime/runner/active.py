"""The recorder that is on, if any: what code that is recorded looks at.

A look costs tens of nanoseconds, so it stands where a step passes a few times, never in a loop.
"""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """A recorder hears of phases and spans while it is ``active``. Any thread may call it."""

    def phase(self, name: str) -> None:
        """The engine's thread begins another part of its step."""

    def node(self, stream: str, name: str, begin: int, end: int) -> None:
        """A node ran on a stream that a thread plays; ns of the monotonic clock. The ends of a
        channel are named as ``partition`` names them."""


active: Sink | None = None


def phase(name: str) -> None:
    """Tells the recorder, if one is on."""
    if active is not None:
        active.phase(name)


def node(stream: str, name: str, begin: int, end: int) -> None:
    """Tells the recorder, if one is on."""
    if active is not None:
        active.node(stream, name, begin, end)


def activate(sink: Sink | None) -> None:
    """Makes it the one that is told, or nobody."""
    global active
    active = sink
