"""Parts of a step in threads of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from .link import Link

_Job = tuple[Callable[[], None], threading.Event]

_IDLE: list[SimpleQueue[_Job]] = []
"""Those of threads that have nothing to do. To start a thread takes a millisecond beside torch, for
which the next GPU would wait."""
os.register_at_fork(after_in_child=_IDLE.clear)


def _work(jobs: SimpleQueue[_Job]) -> None:
    while True:
        run, ended = jobs.get()
        try:
            run()
        except BaseException:
            ended.set()
            raise
        del run  # it belongs to who waits for its end
        _IDLE.append(jobs)
        ended.set()


def _in_a_thread(run: Callable[[], None]) -> threading.Event:
    """Runs it in a thread that does nothing else meanwhile; what is set when it has run."""
    try:
        jobs = _IDLE.pop()
    except IndexError:
        jobs = SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="stream", daemon=True).start()
    ended = threading.Event()
    jobs.put((run, ended))
    return ended


class Launching:
    """One part of a step in a thread of its own, which plays a device's stream.

    Args:
        run: the part; ``link``: released if it fails, since others would wait for what comes no
            more.
    """

    def __init__(self, run: Callable[[], None], link: Link | None) -> None:
        self._link = link
        self._error: BaseException | None = None
        self._run: Callable[[], None] | None = run
        self._ended = _in_a_thread(self._begin)

    @property
    def ended(self) -> bool:
        """Whether it has run."""
        return self._ended.is_set()

    def end(self) -> None:
        """Waits until it has run.

        Raises:
            what it raised.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error

    @torch.inference_mode()  # of the thread that made a step's tensors, perhaps: they change in it
    def _begin(self) -> None:
        run, self._run = self._run, None  # nobody else keeps it
        assert run is not None
        try:
            run()
        except BaseException as error:
            self._error = error
            if self._link is not None:
                self._link.release()
