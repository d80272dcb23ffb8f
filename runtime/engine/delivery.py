"""From the engine's thread to consumers: a plain queue, or an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from .requests.request import Event

INTERVAL = 0.004
"""Seconds between two deliveries. Waking an event loop and sending a piece costs some 100 us of
Python, beside an engine whose step may take no longer than 1 ms. Steps that take longer than this
are delivered one by one."""


class LoopBridge:
    """Carries events into one event loop, at most once each ``INTERVAL``: what comes in between
    wakes the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False
        self._delivered = -INTERVAL

    def put(self, queue: asyncio.Queue[Event], event: Event) -> None:
        """Called by the engine's thread. Raises RuntimeError if the loop is closed."""
        self._events.append((queue, event))
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._woken = False  # the next request of this loop is to hear of it too
                raise

    def _wake(self) -> None:
        wait = self._delivered + INTERVAL - self.loop.time()
        if wait <= 0:
            self._drain()
        else:
            self.loop.call_later(wait, self._drain)

    def _drain(self) -> None:
        # Cleared first: an event that comes while the rest is handed out wakes the loop again.
        self._woken = False
        self._delivered = self.loop.time()
        while self._events:
            queue, event = self._events.popleft()
            queue.put_nowait(event)
