"""What the levels behind a device's pages have, and what is known of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..kv_cache.page_store import Kind, PageStore
from .blocks.folder import ModelFolder
from .blocks.ram import RamBlocks
from .blocks.shared import SharedBlocks
from .counts import Counts

T = TypeVar("T")
LOG = logging.getLogger("pykernels")
RAM, DISK, STORE = "ram", "disk", "store"


class Places:
    """Main memory beside a GPU, a directory, a store of several machines; some of them.

    Args:
        pages: of the device.
        folder: None: nothing is on disk; ``ram``, ``store``: likewise, in main memory, and on
            other machines.
        shared: other engines write into the directory, which is asked for each block, and wait for
            what this one writes.

    Attributes:
        counts: of each level, by its name: "ram", "disk", "store".
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
        self._others_wait = shared
        self._pages, self.folder, self.ram, self.behind = pages, folder, ram, store
        there = {RAM: ram is not None, DISK: folder is not None, STORE: store is not None}
        names = [name for name, is_there in there.items() if is_there]
        self.counts = Counts(names, pages.nbytes(Kind.PAGE))
        self._ask_after = 0.0
        self._told: set[tuple[str, str]] = set()

    def __contains__(self, name: str) -> bool:
        """Whether a level has the block of this file's name."""
        return self._level_of(name) is not None

    def have(self, name: str) -> bool:
        """Whether every level has it that it is worth writing to."""
        missing = self.ram is not None and name not in self.ram and self.pays(RAM)
        missing |= self.folder is not None and name not in self.folder.names and self.pays(DISK)
        behind = self.behind
        return not (missing or (behind and name not in behind.names and self.pays(STORE)))

    def pays(self, level: str) -> bool:
        """Whether a page is worth writing there: somebody waits for it, or see ``Counts.pays``."""
        return self._others_wait or self.counts.pays(level)

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

    def seconds(self, names: Iterable[tuple[Kind, str]]) -> float | None:
        """Seconds that reading these blocks takes; None: unknown."""
        nbytes = dict.fromkeys(self.counts.stats, 0)
        for kind, name in names:
            if (level := self._level_of(name)) is not None:
                nbytes[level] += self._pages.nbytes(kind)
        return self.counts.seconds(nbytes)

    @property
    def near(self) -> int | None:
        """Pages that main memory holds; None: it is no level."""
        return None if self.ram is None else self.ram.count(Kind.PAGE)

    def _level_of(self, name: str) -> str | None:
        if self.ram is not None and name in self.ram:
            return RAM
        if self.folder is not None and name in self.folder.names:
            return DISK
        return STORE if self.behind is not None and name in self.behind.names else None

    def _try(self, level: str, done: str, do: Callable[[], T]) -> T | None:
        """What it gives; None: the level has failed. The log is told once of each thing that a disk
        does not do, and of a store that is gone."""
        try:
            return do()
        except OSError as error:
            self.counts.stats[level].failed += 1
            there = self.folder if level == DISK else self.behind
            if level == STORE and self.behind is not None:
                self.behind.names.clear()  # a master that begins anew has none of them
            told = level, done if level == DISK else ""
            if told not in self._told and there is not None:
                self._told.add(told)
                where, why = there.root, error.strerror or error
                LOG.warning("blocks of the KV cache in %s cannot be %s: %s", where, done, why)
            return None
