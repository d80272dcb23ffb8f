"""A look, while steps run, whether a device has failed for which others wait, or all stand still.

A stream that waits for a flag waits for ever, and so does the host for that stream. What a GPU has
failed with is seen by whoever asks that GPU: one thread of the process asks all of them, a few
times a second, as long as steps are in flight. GPUs that wait for each other have failed with
nothing: they are given up when no flag has been set for ``LIMIT_S``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from .graph import CAPTURE

_EVERY_S, _IDLE_S = 0.1, 5.0
"""Seconds between two looks, and for which the thread waits for the next step before it ends."""
LIMIT_S = 60.0
"""Seconds after which GPUs of which none goes on are given up."""


class _Part(Protocol):
    def ready(self) -> bool: ...


class _Meets(Protocol):
    @property
    def passed(self) -> int: ...

    def release(self) -> None: ...

    def give_up(self) -> None: ...


@dataclass
class _Step:
    parts: Sequence[_Part]
    link: _Meets
    limit_s: float
    parked: Callable[[], bool]
    passed: int = -1
    since: float = 0.0

    def stands_still(self) -> bool:
        """Whether no flag has been set for as long as it may take."""
        now, passed = time.monotonic(), self.link.passed
        if passed != self.passed or self.parked():
            self.passed, self.since = passed, now
        return now > self.since + self.limit_s


class Watch:
    """Steps in flight, and the thread that looks at them while there are any."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(
        self,
        parts: Sequence[_Part],
        link: _Meets,
        limit_s: float = LIMIT_S,
        parked: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """Within it the parts of a step are launched, and run.

        Args:
            parts: of GPUs; ``ready`` raises what its GPU has failed with.
            link: where they meet. It is released then, so that nobody waits any more, and given up
                if they stand still: none of them sets a flag for ``limit_s``.
            parked: whether somebody holds the step up, who lets it go on.
        """
        self._steps[id(parts)] = _Step(parts, link, limit_s, parked)
        if self._thread is None:
            self._start()
        try:
            yield
        finally:
            del self._steps[id(parts)]

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(_EVERY_S)
            if self._look():
                idle_since = time.monotonic()
            elif time.monotonic() > idle_since + _IDLE_S:
                with self._lock:
                    self._thread = None
                if not self._steps:
                    return
                self._start()  # a step that began meanwhile may have seen this thread
                return

    def _look(self) -> bool:
        """Whether there are steps in flight."""
        steps = list(self._steps.values())
        for step in steps:
            try:
                with CAPTURE:  # while anything is captured nobody may ask
                    for part in step.parts:
                        part.ready()
            except torch.AcceleratorError:  # whoever waits for the part hears it, too
                step.link.release()
            if step.stands_still():
                step.link.give_up()
        return bool(steps)


WATCH = Watch()
"""That of this process."""
