"""When a step of a long prompt waits for steps with shorter ones.

Such a step takes seconds, in which it has most of a GPU and of main memory. A short prompt that
came later is read by the other runner meanwhile; until that is done the long one's step is parked
at the end of a layer, and then goes on. It is parked for a share of its time, and for
``GRACE_SECONDS`` besides: however many short prompts come, the long one is read.
"""

from __future__ import annotations

from ...runner.batch import PrefillRunner

GRACE_SECONDS = 1.0
"""What a step may be parked for at any time of its life, once."""
_LEAST_SECONDS = 0.05
"""A shorter wait is not worth it: no layer ends meanwhile."""


class Yields:
    """Parks the steps of a prefill runner, within bounds.

    Args:
        share: of a step's time, what it may be parked for; 0: it is never parked.

    Attributes:
        seconds: in which steps were parked so far.
    """

    def __init__(self, runner: PrefillRunner, share: float) -> None:
        self._runner, self._share = runner, share
        self._began = self._parked_at = self._parked = 0.0
        self._granted: float | None = None  # seconds; None: it runs
        self.seconds = 0.0

    def began(self, now: float) -> None:
        """A step was launched."""
        self._began, self._parked, self._granted = now, 0.0, None

    def update(self, others: bool, now: float) -> None:
        """Parks the step, or lets it go on.

        Args:
            others: whether a step with other prompts runs.
        """
        if self._granted is not None:
            if others and now < self._parked_at + self._granted:
                return
            self._go_on(now)
        if others and (left := self.left(now)) >= _LEAST_SECONDS:
            self._parked_at, self._granted = now, left
            self._runner.park(left)

    def left(self, now: float) -> float:
        """Seconds that the step may be parked for by now."""
        if not self._share:
            return 0.0
        return GRACE_SECONDS + self._share * (now - self._began) - self._parked

    def ended(self, now: float) -> float:
        """The step has ended, or is to end; returns the seconds in which it was not parked."""
        if self._granted is not None:
            self._go_on(now)
        return now - self._began - self._parked

    def _go_on(self, now: float) -> None:
        assert self._granted is not None
        seconds = min(now - self._parked_at, self._granted)
        self._parked += seconds
        self.seconds += seconds
        self._granted = None
        self._runner.resume()
