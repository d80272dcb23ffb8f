"""The thread that moves blocks between a device's pages and the levels behind, in parallel with the
steps.

Reads come first: a request waits for them. What is to be written is a page of the device until it
is copied, so a page that is needed meanwhile is not written at all; no step waits for a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ..kv_cache.page_store import Kind
from .blocks.block import BlockName
from .levels import Levels
from .loading import Ask, Load, Stage

LOG = logging.getLogger("pykernels")
_HANGS_SECONDS = 5
"""A disk that answers no more is left alone after so long."""
_STAGED = 16
"""Blocks that are brought near before it is looked what else there is to do."""


@dataclass
class _Asked:
    """What there is to do; of the lock's owner.

    Attributes:
        writes: by kind, and page or slot: the block, and when it was used.
        copying: the one of these that is being copied; ``writing``: whose block is being written.
    """

    loads: deque[Load] = field(default_factory=deque)
    stages: deque[Stage] = field(default_factory=deque)
    writes: OrderedDict[tuple[Kind, int], tuple[BlockName, int]] = field(
        default_factory=OrderedDict
    )
    touches: deque[tuple[BlockName, int]] = field(default_factory=deque)
    asks: deque[Ask] = field(default_factory=deque)
    look: bool = False
    copying: tuple[Kind, int] | None = None
    writing: str = ""
    end: float | None = None  # the time at which the thread ends, whatever is left

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        near = self.loads or self.stages
        return bool(near or self.asks or self.writes or self.touches or self.look)


class Worker:
    """Reads and writes blocks, one after the other.

    Attributes:
        done: loads that have ended, the oldest first.
        ended: whether nothing is read or written any more.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.done: deque[Load] = deque()
        self._asked = _Asked()
        self._changed = threading.Condition()
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="kv blocks", daemon=True)
        self._thread.start()

    def load(self, load: Load) -> None:
        """Reads it; it is in ``done`` then."""
        with self._changed:
            (self.done if self.ended else self._asked.loads).append(load)
            self._changed.notify_all()

    def stage(self, stage: Stage) -> None:
        """Brings its blocks near, behind all loads."""
        with self._changed:
            if not self.ended and self._asked.end is None:
                self._asked.stages.append(stage)
            self._changed.notify_all()

    def ask(self, ask: Ask) -> None:
        """Asks the store."""
        with self._changed:
            if self.ended:
                ask.ended = True
            else:
                self._asked.asks.append(ask)
            self._changed.notify_all()

    def write(self, block: BlockName, place: int, used: int) -> None:
        """Writes the page or slot, unless ``forget`` comes first."""
        with self._changed:
            if not self.ended:
                self._asked.writes[block.kind, place] = block, used
            self._changed.notify_all()

    def touch(self, block: BlockName, used: int) -> None:
        """A block that the levels have was of use."""
        with self._changed:
            self._asked.touches.append((block, used))
            self._changed.notify_all()

    def look(self) -> None:
        """Finds what other processes have written, if that was not done just now."""
        with self._changed:
            self._asked.look = True
            self._changed.notify_all()

    def is_writing(self, names: Collection[str]) -> bool:
        """Whether one of these files' blocks is to be written, or is being."""
        with self._changed:
            asked, late = self._asked, self.levels.is_late
            if asked.writing in names or any(map(late, names)):
                return True
            return any(block.file in names for block, _ in asked.writes.values())

    def forget(self, kind: Kind, place: int) -> None:
        """A page or slot is about to get other contents: from now on it is not read."""
        with self._changed:
            if self._asked.writes.pop((kind, place), None) is not None:
                self.levels.counts.first.dropped += 1
            while self._asked.copying == (kind, place):
                self._changed.wait()

    def stop(self, seconds: float = 0.0) -> None:
        """Ends the thread when all is written, or so much time has passed."""
        with self._changed:
            self._asked.end = time.monotonic() + seconds
            for load in self._asked.loads:
                load.cancelled = True
            self._asked.stages.clear()
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """``stop``, and waits for the end, unless a disk hangs: no page is touched any more."""
        self.stop(seconds)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds + _HANGS_SECONDS)

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except Exception as error:  # of the device, or a mistake of ours: the engine goes on
            LOG.warning("the KV cache has no more levels behind it: %s", error, exc_info=error)
        finally:
            with self._changed:
                self.ended = True
                self.done += self._asked.loads
                for ask in self._asked.asks:
                    ask.ended = True
                self._asked = _Asked()
                self._changed.notify_all()
            self.levels.close()

    def _next(self) -> bool:
        """Waits for something to do, and does it; False: the end has come."""
        asked, levels = self._asked, self.levels
        with self._changed:
            while not (asked.any or levels.late):
                if asked.end is not None:
                    return False
                self._changed.wait()
            if asked.end is not None and time.monotonic() >= asked.end:
                levels.counts.first.dropped += len(asked.writes)
                return False
            load = asked.loads[0] if asked.loads else None
            asks, asked.asks = asked.asks, deque()
            touches, asked.touches = asked.touches, deque()
            look, asked.look = asked.look, False
            stage = write = None
            if load is None and asked.stages:
                stage = asked.stages.popleft()
            if load is None and asked.writes and levels.takes(next(iter(asked.writes))[0]):
                asked.copying, write = asked.writes.popitem(last=False)
                asked.writing = write[0].file
        for ask in asks:
            levels.ask(ask.names)
            ask.ended = True
        if load is not None:
            self._load(load)
            asked.loads.popleft()
            self.done.append(load)
        for block, used in touches:
            levels.touch(block, used)
        if look:
            levels.look()
        if write is not None:
            self._write(*write)
        elif load is None and levels.late:
            levels.store_late()
        if stage is not None and not self._is_near(stage):
            with self._changed:
                if asked.end is None:
                    asked.stages.appendleft(stage)
        return True

    def _load(self, load: Load) -> None:
        wanted: list[tuple[BlockName, int | None]] = [*load.pages]
        if load.state is not None:
            wanted.append(load.state)
        try:
            for i, (block, page) in enumerate(load.pages):
                self.levels.prefetch(wanted, i)
                if load.cancelled or not self.levels.read(block, page):
                    return
                load.loaded += 1
            if load.state is not None and not load.cancelled:
                load.has_state = self.levels.read(*load.state)
        finally:
            self.levels.settle()

    def _is_near(self, stage: Stage) -> bool:
        """Brings some of its blocks near; whether there is no more to do."""
        end = min(stage.done + _STAGED, len(stage.blocks))
        wanted = [(block, None) for block in stage.blocks]
        try:
            for at in range(stage.done, end):
                if stage.cancelled or self._asked.loads:
                    break
                self.levels.prefetch(wanted, at, end)
                if not self.levels.bring(stage.blocks[at]):
                    return True
                stage.done += 1
        finally:
            self.levels.settle()
        return stage.cancelled or stage.done == len(stage.blocks)

    def _write(self, block: BlockName, used: int) -> None:
        assert self._asked.copying is not None
        _, place = self._asked.copying
        try:
            data = self.levels.copy(block, place)
        finally:
            with self._changed:
                self._asked.copying = None
                self._changed.notify_all()
        self.levels.store(block, data, used)
        self._asked.writing = ""
