"""Admission to the queue: a bound on those who wait, an estimate of the wait, fair turns."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..http.errors import ApiError
from ..http.settings import ServerSettings

AGEING_SECONDS = 1.0
"""What a step of priority is worth in an engine behind a server: see ``Turns``."""
_LONGEST_TURN = 60
_SMOOTHING = 0.1
"""Weight of the newest request in the running average."""
_LONGEST_RETRY = 60


class Admission:
    """Counts outputs from the request's first byte on, before any text is tokenized: a flood costs
    little.

    Args:
        seats: outputs that the engine runs at once.
        clock: seconds, for tests.

    Attributes:
        inside: outputs that have entered and not left.
    """

    def __init__(
        self, seats: int, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seats, self._settings = seats, settings
        self._turns = Turns(clock)
        self.inside = 0
        self._seconds: float | None = None

    @contextmanager
    def entered(self, client: str, outputs: int = 1) -> Iterator[int]:
        """Places for one request; gives its priority.

        Raises:
            ApiError: 429, with the seconds after which it is worth trying again.
        """
        most = self._seats + self._settings.max_waiting
        if self.inside + outputs > most:
            raise self._busy(f"{self.inside} outputs are running or waiting, {most} may")
        limit, wait = self._settings.max_ttft, self.estimate()
        if limit is not None and wait > limit:
            raise self._busy(f"the first token would come after some {wait:.0f} seconds")
        self.inside += outputs
        priority = self._turns.take(client)
        try:
            yield priority
        finally:
            self.inside -= outputs
            self._turns.leave(client)

    def estimate(self) -> float:
        """Seconds to the first token of an output that enters now: none while seats are free, then
        as long as it takes the outputs ahead of it to leave, if they take as long as the last."""
        ahead = self.inside + 1 - self._seats
        return 0.0 if ahead <= 0 else ahead * (self._seconds or 0.0) / self._seats

    def took(self, seconds: float) -> None:
        """An output has ended that was so long in the batch."""
        old = seconds if self._seconds is None else self._seconds
        self._seconds = old + _SMOOTHING * (seconds - old)

    def _busy(self, why: str) -> ApiError:
        leaves = (self._seconds or 1.0) / self._seats
        retry = min(_LONGEST_RETRY, max(1, math.ceil(leaves)))
        return ApiError(429, f"The server is busy: {why}.", code="busy", retry_after=retry)


class Turns:
    """Fair turns between clients, as start-time fair queueing has them.

    The engine serves by time of arrival plus priority times ``AGEING_SECONDS``. A client that has
    nothing in the server has priority 0; each of its further requests comes a second behind its
    last one, so a burst of one client does not hold up another's first request, and a client's own
    requests keep their order.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._requests: Counter[str] = Counter()

    def take(self, client: str) -> int:
        """The priority of this client's next request."""
        now = self._clock()
        last = self._last.get(client)
        priority = 0 if last is None else math.ceil((last - now) / AGEING_SECONDS + 1)
        priority = min(max(0, priority), _LONGEST_TURN)
        self._last[client] = now + priority * AGEING_SECONDS
        self._requests[client] += 1
        return priority

    def leave(self, client: str) -> None:
        """One of its requests has ended."""
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client], self._last[client]
