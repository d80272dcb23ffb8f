"""From the engine's thread to consumers: a plain queue, or an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from .request import Event


class LoopBridge:
    """Carries events into one event loop; what comes in a burst wakes the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False

    def put(self, queue: asyncio.Queue[Event], event: Event) -> None:
        """Called by the engine's thread. Raises RuntimeError if the loop is closed."""
        self._events.append((queue, event))
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._woken = False  # the next request of this loop is to hear of it too
                raise

    def _drain(self) -> None:
        # Cleared first: an event that comes while the rest is handed out wakes the loop again.
        self._woken = False
        while self._events:
            queue, event = self._events.popleft()
            queue.put_nowait(event)
