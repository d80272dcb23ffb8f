"""A look, while steps run, whether a device has failed for which others wait.

A stream that waits for a flag waits for ever, and so does the host for that stream. What a GPU has
failed with is seen by whoever asks that GPU: one thread of the process asks all of them, a few
times a second, as long as steps are in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from .graph import CAPTURE

_EVERY_S, _IDLE_S = 0.1, 5.0
"""Seconds between two looks, and for which the thread waits for the next step before it ends."""


class _Part(Protocol):
    def ready(self) -> bool: ...


class Watch:
    """Steps in flight, and the thread that looks at them while there are any."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[Sequence[_Part], Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, parts: Sequence[_Part], release: Callable[[], None]) -> Iterator[None]:
        """Within it the parts of a step run.

        Args:
            parts: of GPUs; ``ready`` raises what its GPU has failed with.
            release: called then, so that nobody waits any more.
        """
        self._steps[id(parts)] = parts, release
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
        for parts, release in steps:
            try:
                with CAPTURE:  # while anything is captured nobody may ask
                    for part in parts:
                        part.ready()
            except torch.AcceleratorError:  # whoever waits for the part hears it, too
                release()
        return bool(steps)


WATCH = Watch()
"""That of this process."""
