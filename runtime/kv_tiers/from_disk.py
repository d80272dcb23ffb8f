"""Blocks on their way from a disk to a page or slot, or to main memory, several at once."""

from __future__ import annotations

from typing import NamedTuple

from ..kv_cache.page_store import Bytes, Kind, PageStore
from .blocks.block import BlockName
from .blocks.folder import Found, ModelFolder
from .blocks.ram import RamBlocks
from .blocks.readers import AHEAD, Readers

_MOST = {Kind.PAGE: AHEAD, Kind.STATE: 1}
"""Blocks under way: a load has one state."""


class _Into(NamedTuple):
    """Where a block goes: its memory, None if that is its page or slot itself, and its place in
    main memory's blocks, -1 if it has none."""

    data: Bytes | None
    place: int


class FromDisk:
    """Reads blocks of a folder to where they are wanted; one thread calls it.

    Where main memory is a level a block is read into a place of it. Else it goes straight into its
    page or slot, or, where a device has those, into memory from which that copies.

    Args:
        pages: of the device; ``ram``: main memory, if it is a level.
    """

    def __init__(self, pages: PageStore, folder: ModelFolder, ram: RamBlocks | None) -> None:
        self._pages, self._ram, self._readers = pages, ram, Readers(folder)
        self._into: dict[BlockName, _Into] = {}
        self._staging: dict[Kind, list[Bytes]] = {kind: [] for kind in Kind}
        if ram is None and pages.space(Kind.PAGE, 0) is None:
            for kind, free in self._staging.items():
                free += (pages.host(pages.nbytes(kind)) for _ in range(_MOST[kind]))

    def __contains__(self, block: BlockName) -> bool:
        """Whether it is under way."""
        return block in self._into

    def begin(self, block: BlockName, place: int | None) -> bool:
        """Whether there is memory for one more block, which is under way now.

        Args:
            place: its page or slot; None: it comes into main memory, which is a level.
        """
        kind, most, at, header = block.kind, _MOST[block.kind], -1, None
        if self._ram is not None:  # half of it, since nothing that is there is to go for more
            most = min(most, max(1, self._ram.count(kind) // 2))
        if sum(other.kind is kind for other in self._into) >= most:
            return False
        data, space = None, None
        if self._ram is not None:
            at = self._ram.take(kind)
            value = self._ram.memory[kind][at]
            data = value[self._ram.header :]
            if self._ram.header:
                header = value[self._ram.header - block.header_bytes : self._ram.header].data
        else:
            assert place is not None
            if (space := self._pages.space(kind, place)) is None:
                data = self._staging[kind].pop()
        if data is not None:
            space = [data.data]
        assert space is not None
        self._readers.begin(block, space, header)
        self._into[block] = _Into(data, at)
        return True

    def take(self, block: BlockName) -> tuple[Found, Bytes | None]:
        """Waits for a block that is under way. In main memory it is there for others then.

        Returns:
            What was found, and where its bytes are, until the next ``begin``; None: in its page.

        Raises:
            OSError: the disk's.
        """
        found: Found | None = None
        try:
            found = self._readers.take(block)
        finally:
            data = self._free(block, whole=found == "whole")
        return found, data

    def settle(self) -> None:
        """Nothing is written any more to pages and slots of blocks that were not taken."""
        self._readers.settle()
        for block in list(self._into):
            self._free(block, whole=False)

    def close(self) -> None:
        """Nothing is read any more."""
        self._readers.close()

    def _free(self, block: BlockName, whole: bool) -> Bytes | None:
        data, at = self._into.pop(block)
        if self._ram is not None:
            self._ram.give(block.kind, at, block if whole else None)
        elif data is not None:
            self._staging[block.kind].append(data)
        return data
