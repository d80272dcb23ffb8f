"""The levels behind a device's pages, the nearest first, and how a block crosses them.

What is in a level is in those behind it too, or on its way there. A block that comes from disk
stays in main memory, where that is a level.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from ..kv_cache.page_store import Bytes, Kind, PageStore
from .block import BlockName
from .folder import ModelFolder
from .ram import RamBlocks
from .shared import SharedBlocks
from .stats import LevelStats, Rate

T = TypeVar("T")
LOG = logging.getLogger("pykernels")
RAM, DISK, STORE = "ram", "disk", "store"
_AHEAD = 8
"""Blocks that the system reads while the one before them is checked."""
_PAUSE_SECONDS = 60
"""After an error nothing is written for so long, nor is a store asked."""


class Levels:
    """Main memory beside a GPU, a directory, a store of several machines; some of them.

    Args:
        pages: of the device.
        folder: None: nothing is on disk; ``ram``, ``store``: likewise, in main memory, and on
            other machines.
        shared: other engines write into the directory, which is asked for each block.

    Attributes:
        stats: of each level, by its name.
    """

    def __init__(
        self,
        pages: PageStore,
        folder: ModelFolder | None,
        ram: RamBlocks | None = None,
        store: SharedBlocks | None = None,
        shared: bool = False,
    ) -> None:
        self._shared = folder if shared else None
        self._pages, self.folder, self.ram, self.behind = pages, folder, ram, store
        there = {RAM: ram is not None, DISK: folder is not None, STORE: store is not None}
        self.stats = {name: LevelStats() for name, is_there in there.items() if is_there}
        self._rates = {name: Rate() for name in self.stats}
        self._staging = pages.host(max(map(pages.nbytes, Kind)))
        self._later: OrderedDict[str, tuple[BlockName, int]] = OrderedDict()
        self._storing = ""  # the one of these that is being written
        self._write_after = dict.fromkeys(self.stats, 0.0)
        self._ask_after = self._got_seconds = 0.0  # of one block of the last batch
        self._told: set[tuple[str, str]] = set()

    # What the engine's thread asks.

    def __contains__(self, name: str) -> bool:
        """Whether a level has the block of this file's name."""
        return self._level_of(name) is not None

    def have(self, name: str) -> bool:
        """Whether every level has it."""
        return all(name in each for each in (self.ram, *self._behind()) if each is not None)

    def _behind(self) -> list[set[str]]:
        """Names of what is on disk, and in the store."""
        return [each.names for each in (self.folder, self.behind) if each is not None]

    @property
    def is_asked(self) -> bool:
        """Whether there is something to be asked, and it has answered of late."""
        there = self.behind is not None or self._shared is not None
        return there and time.monotonic() >= self._ask_after

    def stored(self, name: str) -> bool:
        """Whether the level has it that is behind all others."""
        if self.behind is not None:
            return self.behind.offers(name)
        return name in self._behind()[-1]

    def title(self, level: str) -> str:
        """What figures call it."""
        return self.behind.level if level == STORE and self.behind is not None else level

    def is_late(self, name: str) -> bool:
        """Whether it is in main memory, and is to be written, or is being."""
        return name in self._later or name == self._storing

    def seconds(self, names: Iterable[tuple[Kind, str]]) -> float | None:
        """Seconds that reading these blocks takes; None: unknown."""
        nbytes = dict.fromkeys(self.stats, 0)
        for kind, name in names:
            if (level := self._level_of(name)) is not None:
                nbytes[level] += self._pages.nbytes(kind)
        each = [self._rates[level].seconds(n) for level, n in nbytes.items() if n]
        return None if None in each else sum(s for s in each if s is not None)

    def last_seconds(self, pages: int) -> float | None:
        """Seconds that reading so many pages from the last level takes; None: unknown."""
        return list(self._rates.values())[-1].seconds(pages * self._pages.nbytes(Kind.PAGE))

    def hope(self) -> None:
        """They were too slow to be used."""
        for rate in self._rates.values():
            rate.hope()

    @property
    def first(self) -> LevelStats:
        """Counts of the nearest level, into which pages are copied."""
        return next(iter(self.stats.values()))

    @property
    def last(self) -> LevelStats:
        """Counts of the last level, which has what any has."""
        return list(self.stats.values())[-1]

    def _level_of(self, name: str) -> str | None:
        if self.ram is not None and name in self.ram:
            return RAM
        if self.folder is not None and name in self.folder.names:
            return DISK
        return STORE if self.behind is not None and name in self.behind.names else None

    # What the worker's thread does.

    def prefetch(self, blocks: Sequence[BlockName], at: int) -> None:
        """Called before each of these blocks is read: has the disk begin with later ones, and the
        store bring those that follow each other there."""
        if self.behind is not None and not self.behind.has_ahead(blocks[at]):
            run = takewhile(lambda block: self._level_of(block.file) == STORE, blocks[at:])
            self._get(self.behind, list(run))
        ahead = blocks[at + 1 : at + 1 + _AHEAD] if at == 0 else blocks[at + _AHEAD :][:1]
        for block in ahead:
            if self.folder is not None and self._level_of(block.file) == DISK:
                self.folder.prefetch(block)

    def read(self, block: BlockName, place: int) -> bool:
        """Whether a block is in a page or slot now; anything may be there if not."""
        kind, began = block.kind, time.perf_counter()
        if self.ram is not None and (data := self.ram.find(block)) is not None:
            self._pages.write(kind, place, data)
            self._has_read(RAM, kind, time.perf_counter() - began)
            return True
        if self.folder is not None and block.file in self.folder.names:
            if self._read_disk(self.folder, block, place):
                return True
        return self.behind is not None and self._read_store(self.behind, block, place)

    def _read_disk(self, folder: ModelFolder, block: BlockName, place: int) -> bool:
        kind, data, began = block.kind, None, time.perf_counter()
        space = None if self.ram is not None else self._pages.space(kind, place)
        if space is None:
            data = self._room(kind)
            space = [data.data]
        found = self._try(DISK, "read", lambda: folder.read(block, space))
        self.stats[DISK].damaged += found == "damaged"
        if found != "whole":
            return False
        if data is not None:
            self._pages.write(kind, place, data)
        if self.ram is not None:
            self.ram.keep(block)
        self._has_read(DISK, kind, time.perf_counter() - began)
        return True

    def _read_store(self, store: SharedBlocks, block: BlockName, place: int) -> bool:
        """What comes from there stays in the levels in front."""
        began = time.perf_counter() - self._got_seconds * store.has_ahead(block)
        if (got := self._try(STORE, "read", lambda: store.read(block))) is None:
            return False
        found, data = got
        self.stats[STORE].damaged += found == "damaged"
        if found != "whole":
            return False
        self._pages.write(block.kind, place, data)
        self._has_read(STORE, block.kind, time.perf_counter() - began)
        if self.ram is not None:
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
        failed = self.stats[STORE].failed
        self._try(STORE, "asked for", lambda: store.ask(names))
        if self.stats[STORE].failed > failed:
            self._ask_after = time.monotonic() + _PAUSE_SECONDS

    def copy(self, block: BlockName, place: int) -> Bytes:
        """Copies a page or slot, which is not needed any more then; ``store`` follows."""
        data, began = self._room(block.kind), time.perf_counter()
        self._pages.read(block.kind, place, data)
        if self.ram is not None:
            self.ram.keep(block)
            self._has_written(RAM, data.nbytes, time.perf_counter() - began)
        return data

    def store(self, block: BlockName, data: Bytes, used: int) -> None:
        """Writes what was copied to disk, now or later."""
        if self.folder is not None and block.file in self.folder.names:
            self.folder.touch(block, used)
        if all(block.file in names for names in self._behind()):
            return
        if self.ram is not None:
            self._later[block.file] = block, used
        else:
            self._write(block, data, used)

    @property
    def late(self) -> int:
        """Blocks that are in main memory, and are to be written."""
        return len(self._later)

    def store_late(self) -> None:
        """Writes one of them."""
        self._storing = next(iter(self._later))
        block, used = self._later.pop(self._storing)
        data = None if self.ram is None else self.ram.find(block)
        if data is None:
            self.last.dropped += 1
        else:
            self._write(block, data, used)
        self._storing = ""

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
        if self.behind is not None:
            self.behind.close()

    def _room(self, kind: Kind) -> Bytes:
        if self.ram is not None:
            return self.ram.room(kind)
        return self._staging[: self._pages.nbytes(kind)]

    def _write(self, block: BlockName, data: Bytes, used: int) -> None:
        folder, store = self.folder, self.behind
        if folder is not None and block.file not in folder.names:
            self._written(DISK, lambda: folder.write(block, data.data, used))
        if store is not None and block.file not in store.names:
            self._written(STORE, lambda: store.write(block, data))

    def _written(self, level: str, write: Callable[[], int]) -> None:
        nbytes, began = None, time.perf_counter()
        if time.monotonic() >= self._write_after[level]:
            nbytes = self._try(level, "written", write)
            if nbytes is None:
                self._write_after[level] = time.monotonic() + _PAUSE_SECONDS
        if not nbytes:
            self.stats[level].dropped += 1
        else:
            self._has_written(level, nbytes, time.perf_counter() - began)

    def _has_read(self, level: str, kind: Kind, seconds: float) -> None:
        stats, nbytes = self.stats[level], self._pages.nbytes(kind)
        stats.read += 1
        stats.read_bytes += nbytes
        stats.read_seconds += seconds
        self._rates[level].record(nbytes, seconds)

    def _has_written(self, level: str, nbytes: int, seconds: float) -> None:
        stats = self.stats[level]
        stats.written += 1
        stats.written_bytes += nbytes
        stats.write_seconds += seconds

    def _try(self, level: str, done: str, do: Callable[[], T]) -> T | None:
        """What it gives; None: the level has failed, of which the log is told once."""
        try:
            return do()
        except OSError as error:
            self.stats[level].failed += 1
            there = self.folder if level == DISK else self.behind
            if level == STORE and self.behind is not None:
                self.behind.names.clear()  # a master that begins anew has none of them
            if (level, done) not in self._told and there is not None:
                self._told.add((level, done))
                where, why = there.root, error.strerror or error
                LOG.warning("blocks of the KV cache in %s cannot be %s: %s", where, done, why)
            return None
