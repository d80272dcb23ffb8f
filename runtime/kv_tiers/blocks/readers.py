"""Threads that read blocks of a disk and check them, before anybody waits for them.

A disk is as fast as it can be with several blocks under way, and so is their checking on several
cores: each thread reads one block after the other, and checks it where it lies. Neither holds
Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from .block import BlockName
from .folder import Found, ModelFolder
from .reading import THREADS

AHEAD = 8
"""Blocks that are begun before the first of them is waited for: no thread is idle meanwhile."""


class _Reading(NamedTuple):
    """A block on its way to where it is to be."""

    block: BlockName
    space: Sequence[memoryview]
    header: memoryview | None
    found: Future[Found]


class Readers:
    """Reads a folder's blocks; one thread calls it.

    The threads begin with the first block, and end with ``close`` or with the process: one that
    waits for a disk that hangs keeps nobody from leaving.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self._todo: SimpleQueue[_Reading | None] = SimpleQueue()
        self._begun: dict[str, _Reading] = {}
        self._threads: list[threading.Thread] = []

    def begin(
        self, block: BlockName, space: Sequence[memoryview], header: memoryview | None = None
    ) -> None:
        """Has a block read, see ``ModelFolder.fetch``: nobody else uses that memory until
        ``take``, or ``settle``, has returned."""
        for _ in range(THREADS - len(self._threads)):
            thread = threading.Thread(target=self._run, name="kv reads", daemon=True)
            self._threads.append(thread)
            thread.start()
        reading = _Reading(block, space, header, Future())
        self._begun[block.file] = reading
        self._todo.put(reading)

    def take(self, block: BlockName) -> Found:
        """Waits for a block that was begun; see ``ModelFolder.read``."""
        return self.folder.noted(block, self._begun.pop(block.file).found.result())

    def settle(self) -> None:
        """Waits until no thread reads, and forgets what was begun and not taken."""
        for reading in self._begun.values():
            if not reading.found.cancel():
                reading.found.exception()
        self._begun = {}

    def close(self) -> None:
        """The threads end."""
        for _ in self._threads:
            self._todo.put(None)
        self._threads = []

    def _run(self) -> None:
        while (reading := self._todo.get()) is not None:
            block, space, header, found = reading
            if not found.set_running_or_notify_cancel():
                continue
            try:
                found.set_result(self.folder.fetch(block, space, header))
            except BaseException as error:
                found.set_exception(error)
