"""A stream, its events and flags in memory, played by a thread: what CUDA has, without a GPU.

Operations run in the order in which they were put on a stream, in parallel with everything else. A
flag is a number that both sides may write and wait for (``cuStreamWriteValue32``,
``cuStreamWaitValue32``): a stream that waits for a flag goes no further until it is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from pykernels.errors import PykernelsError

from ...workers.fork import refuse_in_child

Operation = Callable[[], None]


class Flags:
    """Numbers that streams and threads write and wait for, all of them 0 at first.

    A failure is written into all of them at once, so that nobody waits for ever.
    """

    def __init__(self, count: int, timeout_s: float = 30.0) -> None:
        self._values = [0] * count
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.timeout_s = timeout_s

    def write(self, flag: int, value: int) -> None:
        """Writes a number and wakes the threads that wait for it."""
        with self._changed:
            self._values[flag] = value
            self._changed.notify_all()

    def read(self, flag: int) -> int:
        """The number."""
        with self._changed:
            return self._values[flag]

    def wait(self, flag: int, value: int) -> None:
        """Returns when the number is ``value`` or more.

        Raises:
            PykernelsError: ``fail`` was called, or the time is over.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or self._values[flag] >= value, self.timeout_s
            )
            if self._error is not None:
                raise PykernelsError(
                    f"a step that others waited for failed: {self._error}",
                    "Look at the error before it",
                ) from self._error
            if not done:
                raise PykernelsError(
                    f"flag {flag} did not become {value} in {self.timeout_s:g} s",
                    "What should write it has died, or is too slow",
                )

    def fail(self, error: BaseException) -> None:
        """Everyone who waits, now or later, gets an error; the first one stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def mend(self) -> None:
        """No failure any more; the numbers stay."""
        with self._changed:
            self._error = None


class Event:
    """A place in a stream: ``Stream.record`` puts it there."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()  # as CUDA's: one that was never recorded is complete

    def query(self) -> bool:
        """Whether the stream has come to where it was recorded last."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Waits until ``query`` is true."""
        self._reached.wait()

    def _begin(self) -> threading.Event:
        self._reached = threading.Event()
        return self._reached


class Stream:
    """A thread that runs operations in order. After one has failed the others are left out until
    ``synchronize``, which raises that error; events are reached all the same."""

    def __init__(self, name: str = "stream") -> None:
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, operation: Operation) -> None:
        """Puts an operation on the stream and returns at once."""
        self._queue.put(lambda: self._guarded(operation))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """An asynchronous copy."""
        self.launch(lambda: _copy(to, source))

    def write_value(self, flags: Flags, flag: int, value: int) -> None:
        """Writes a flag when everything before is done."""
        self.launch(lambda: flags.write(flag, value))

    def wait_value(self, flags: Flags, flag: int, value: int) -> None:
        """Goes on when the flag is ``value`` or more."""
        self.launch(lambda: flags.wait(flag, value))

    def record(self, event: Event) -> None:
        """The event is reached when everything before is done."""
        self._queue.put(event._begin().set)

    def wait(self, event: Event) -> None:
        """Goes on when the event, as it is recorded now, is reached."""
        reached = event._reached
        self.launch(lambda: _await(reached))

    def synchronize(self) -> None:
        """Waits until everything is done.

        Raises:
            PykernelsError: this is a forked child.
            what an operation raised.
        """
        refuse_in_child(self._pid, "this stream")
        event = Event()
        self.record(event)
        event.synchronize()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread when everything is done."""
        if os.getpid() != self._pid:
            return
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _guarded(self, operation: Operation) -> None:
        if self._error is not None:
            return
        try:
            operation()
        except BaseException as error:  # raised by synchronize, in the thread that waits
            self._error = error

    @torch.inference_mode()  # of the thread that made a step's tensors, perhaps: they change in it
    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation()


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


def _await(reached: threading.Event) -> None:
    reached.wait()
