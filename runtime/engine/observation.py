"""Some steps of a running engine inside an observer, such as a ``Recorder``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from typing import Protocol


class Observer(Protocol):
    """Sees steps: entered before the first of them, left behind the last."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def step(self) -> AbstractContextManager[None]:
        """Around one step."""


class Observation:
    """The next steps that a running engine makes. Its thread alone calls this.

    Before each one that is observed runs one that is not: what the observer does between two steps
    has put the workers to sleep.

    Attributes:
        done: has no result but the end, or the observer's error.
    """

    def __init__(self, observer: Observer, steps: int) -> None:
        self.done: Future[None] = Future()
        self._observer, self._left = observer, steps
        self._entered, self._ahead = False, False

    def step(self, step: Callable[[], bool]) -> bool:
        """Runs a step of the engine. Its errors are raised, the observer's are not."""
        self._ahead = not self._ahead
        if self._ahead:
            return step()
        begun = ended = worked = False
        try:
            if not self._entered:
                self._observer.__enter__()
                self._entered = True
            with self._observer.step():
                begun = True
                worked = step()
                ended = True
        except BaseException as error:
            self.end(error)
            if not begun:
                return step()
            if not ended:
                raise
            return worked
        self._left -= worked
        if self._left == 0:
            self.end()
        return worked

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the observer, however many steps it has seen."""
        entered, self._entered = self._entered, False
        try:
            if entered:
                self._observer.__exit__(None, None, None)
        except Exception as failure:
            error = error or failure
        with suppress(InvalidStateError):  # nobody waits for it any more
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
