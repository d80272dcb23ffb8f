"""The levels behind a device's pages, the nearest first, and how a block crosses them.

What is in a level is in those behind it too, or on its way there. A block that comes from disk
stays in main memory, where that is a level.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile

from ..kv_cache.page_store import Bytes, Kind, PageStore
from .blocks.block import BlockName
from .blocks.folder import ModelFolder
from .blocks.ram import RamBlocks
from .blocks.readers import AHEAD
from .blocks.shared import SharedBlocks
from .from_disk import FromDisk
from .places import DISK, RAM, STORE, Places

_LATE = 64
"""Blocks that are written at once, at most."""
_PAUSE_SECONDS = 60
"""After an error nothing is written for so long, nor is a store asked."""


class Levels(Places):
    """Moves blocks, for the one thread of the worker."""

    def __init__(
        self,
        pages: PageStore,
        folder: ModelFolder | None,
        ram: RamBlocks | None = None,
        store: SharedBlocks | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(pages, folder, ram, store, shared)
        self._staging = pages.host(max(map(pages.nbytes, Kind)))
        self._disk = None if folder is None else FromDisk(pages, folder, ram)
        # What is to be written lies in main memory, which may be no level.
        self._rows = ram if ram is not None or store is None else store.rows
        self._later: OrderedDict[str, tuple[BlockName, int]] = OrderedDict()
        self._storing: frozenset[str] = frozenset()  # those of these that are being written
        self._write_after = dict.fromkeys(self.counts.stats, 0.0)
        self._got_seconds = 0.0  # of one block of the last batch

    def is_late(self, name: str) -> bool:
        """Whether it is in main memory, and is to be written, or is being."""
        return name in self._later or name in self._storing

    def prefetch(
        self, wanted: Sequence[tuple[BlockName, int | None]], at: int, end: int | None = None
    ) -> None:
        """Called before each of these blocks is read into its page or slot, or brought near: begins
        to read it and those behind it from disk, up to ``end``, after which ``settle`` is called;
        and has the store bring those that follow each other there."""
        first, _ = wanted[at]
        if self.behind is not None and not self.behind.has_ahead(first):
            blocks = [block for block, _ in wanted[at:]]
            run = takewhile(lambda block: self._level_of(block.file) == STORE, blocks)
            self._get(self.behind, list(run))
        if self._disk is None:
            return
        for block, place in wanted[at:end][:AHEAD]:
            nowhere = place is None and self.ram is None
            if nowhere or self._level_of(block.file) != DISK:
                return
            if block not in self._disk and not self._disk.begin(block, place):
                return

    def settle(self) -> None:
        """No page or slot is written to any more, but by ``read``."""
        if self._disk is not None:
            self._disk.settle()

    def bring(self, block: BlockName) -> bool:
        """Whether a block is as near as it comes without a page: in main memory, where that is a
        level; else what is on disk in the system's cache, soon, and what is in a store on disk."""
        level = self._level_of(block.file)
        if level is None or level == RAM:
            return level is not None
        if self.folder is not None and level == DISK:
            if self.ram is not None:
                return self._read_disk(block, None)
            self.folder.prefetch(block)
            return True
        near = self.ram is not None or self.folder is not None
        return near and self.behind is not None and self._read_store(self.behind, block, None)

    def read(self, block: BlockName, place: int) -> bool:
        """Whether a block is in a page or slot now; anything may be there if not."""
        kind, began = block.kind, time.perf_counter()
        if self.ram is not None and (data := self.ram.find(block)) is not None:
            self._pages.write(kind, place, data)
            self._has_read(RAM, kind, time.perf_counter() - began)
            return True
        if self.folder is not None and block.file in self.folder.names:
            if self._read_disk(block, place):
                return True
        return self.behind is not None and self._read_store(self.behind, block, place)

    def _read_disk(self, block: BlockName, place: int | None) -> bool:
        """None: only into main memory, which is a level."""
        disk, began = self._disk, time.perf_counter()
        assert disk is not None
        if block not in disk and not disk.begin(block, place):
            disk.settle()
            disk.begin(block, place)
        if (got := self._try(DISK, "read", lambda: disk.take(block))) is None:
            return False
        found, data = got
        self.counts.stats[DISK].damaged += found == "damaged"
        if found != "whole":
            return False
        if data is not None and place is not None:
            self._pages.write(block.kind, place, data)
        self._has_read(DISK, block.kind, time.perf_counter() - began)
        return True

    def _read_store(self, store: SharedBlocks, block: BlockName, place: int | None) -> bool:
        """What comes from there stays in the levels in front; None: it is for them alone."""
        began = time.perf_counter() - self._got_seconds * store.has_ahead(block)
        if (got := self._try(STORE, "read", lambda: store.read(block))) is None:
            return False
        found, data = got
        self.counts.stats[STORE].damaged += found == "damaged"
        if found != "whole":
            return False
        if place is not None:
            self._pages.write(block.kind, place, data)
        self._has_read(STORE, block.kind, time.perf_counter() - began)
        if self.ram is not None and block.file not in self.ram:
            self.ram.room(block.kind)[:] = data
            self.ram.keep(block)
        self.store(block, data, time.time_ns())
        return True

    def _get(self, store: SharedBlocks, blocks: Sequence[BlockName]) -> None:
        if batch := store.batch(blocks):
            began = time.perf_counter()
            self._try(STORE, "read", lambda: store.prefetch(batch))
            self._got_seconds = (time.perf_counter() - began) / len(batch)

    def ask(self, names: Sequence[str]) -> None:
        """Finds which of these blocks others have written."""
        if (folder := self._shared) is not None:
            self._try(DISK, "asked for", lambda: folder.ask(names))
        if (store := self.behind) is None or not self.is_asked:
            return
        failed = self.counts.stats[STORE].failed
        self._try(STORE, "asked for", lambda: store.ask(names))
        if self.counts.stats[STORE].failed > failed:
            self._ask_after = time.monotonic() + _PAUSE_SECONDS
        elif self._ask_after:  # it is there again
            self._ask_after = 0.0
            self._told.discard((STORE, ""))

    def copy(self, block: BlockName, place: int) -> Bytes:
        """Copies a page or slot, which is not needed any more then; ``store`` follows."""
        rows, began = self._rows, time.perf_counter()
        data = self._room(block.kind) if rows is None else rows.room(block.kind)
        self._pages.read(block.kind, place, data)
        if rows is not None:
            rows.keep(block)
        if self.ram is not None:
            self.counts.has_written(RAM, data.nbytes, time.perf_counter() - began)
        return data

    def store(self, block: BlockName, data: Bytes, used: int) -> None:
        """Writes what was copied to disk, now or later."""
        if self.folder is not None and block.file in self.folder.names:
            self.folder.touch(block, used)
        if self.have(block.file):
            if self._rows is not None and self._rows is not self.ram:
                self._rows.drop(block)
            return
        if self._rows is not None and block.file in self._rows:
            self._later[block.file] = block, used
        else:
            self._write([(block, used)], [data])

    @property
    def late(self) -> int:
        """Blocks that are in main memory, and are to be written, or are being."""
        return len(self._later) + len(self._storing)

    def takes(self, kind: Kind) -> bool:
        """Whether a page or slot may be copied before what is late is written."""
        return self._rows is None or self._rows is self.ram or self._rows.has_free(kind)

    def store_late(self) -> None:
        """Writes some of them: one, or as many as a store takes at once."""
        assert self._rows is not None
        late = list(islice(self._later.values(), _LATE))
        if self.behind is None:
            late = late[:1]
        else:
            late = late[: len(self.behind.batch([block for block, _ in late]))]
        self._storing = frozenset(block.file for block, _ in late)
        for name in self._storing:
            del self._later[name]
        found = [(each, self._rows.find(each[0])) for each in late]
        here = [(each, data) for each, data in found if data is not None]
        self.counts.last.dropped += len(found) - len(here)
        self._write([each for each, _ in here], [data for _, data in here])
        if self._rows is not self.ram:
            for block, _ in late:
                self._rows.drop(block)
        self._storing = frozenset()

    def touch(self, block: BlockName, used: int) -> None:
        """A block was of use."""
        if self.ram is not None:
            self.ram.find(block)
        if self.folder is not None:
            self.folder.touch(block, used)

    def look(self) -> None:
        """Finds what other processes have written, if that was not done just now."""
        if self.folder is not None:
            self._try(DISK, "looked at", self.folder.look_again)

    def close(self) -> None:
        """Nothing is read or written any more."""
        if self._disk is not None:
            self._disk.settle()
            self._disk.close()
        if self.behind is not None:
            self.behind.close()

    def _room(self, kind: Kind) -> Bytes:
        if self.ram is not None:
            return self.ram.room(kind)
        return self._staging[: self._pages.nbytes(kind)]

    def _write(self, blocks: Sequence[tuple[BlockName, int]], data: Sequence[Bytes]) -> None:
        folder, store = self.folder, self.behind
        if folder is not None and self.pays(DISK):
            for (block, used), own in zip(blocks, data, strict=True):
                if block.file not in folder.names:
                    write = partial(folder.write, block, own.data, used)
                    self._written(DISK, 1, partial(_one, write))
        if store is not None and self.pays(STORE):
            each = zip(blocks, data, strict=True)
            new = [(block, own) for (block, _), own in each if block.file not in store.names]
            if new:
                named, owns = zip(*new, strict=True)
                self._written(STORE, len(new), lambda: store.write_all(named, owns))

    def _written(self, level: str, blocks: int, write: Callable[[], Sequence[int]]) -> None:
        """Bytes of each block that is to be written now; 0: it is not."""
        each, began = None, time.perf_counter()
        if time.monotonic() >= self._write_after[level]:
            each = self._try(level, "written", write)
            if each is None:
                self._write_after[level] = time.monotonic() + _PAUSE_SECONDS
        written = [nbytes for nbytes in each or () if nbytes]
        self.counts.stats[level].dropped += blocks - len(written)
        if written:
            self.counts.has_written(level, sum(written), time.perf_counter() - began, len(written))

    def _has_read(self, level: str, kind: Kind, seconds: float) -> None:
        self.counts.has_read(level, self._pages.nbytes(kind), seconds)


def _one(write: Callable[[], int]) -> list[int]:
    return [write()]
