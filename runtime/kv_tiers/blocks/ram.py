"""Blocks in main memory beside a GPU, the least recently used of which give way."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pykernels.errors import PykernelsError

from ...kv_cache.page_store import Bytes, Kind, PageStore
from .block import BlockName

_STATES = 0.5
"""Of the memory, where layers have states."""


class RamBlocks:
    """As many blocks as there is memory for; where layers have states, half of it is for those.

    Args:
        pages: of the device, which makes the memory.
        limit: bytes.
        header: bytes in front of each block's, which ``keep`` fills with those of its file
            (``block``): then both are one value of a store.

    Attributes:
        memory: by kind, [blocks, bytes of one], with the ``header`` in front of each.

    Raises:
        PykernelsError: there is no room for one page, or one state.
    """

    def __init__(self, pages: PageStore, limit: int, header: int = 0) -> None:
        self.memory: dict[Kind, Bytes] = {}
        self.header = header
        self._free: dict[Kind, list[int]] = {}
        self._kept: dict[Kind, OrderedDict[str, int]] = {kind: OrderedDict() for kind in Kind}
        states = pages.nbytes(Kind.STATE)
        shares = {Kind.PAGE: 1 - _STATES * bool(states), Kind.STATE: _STATES * bool(states)}
        for kind, share in shares.items():
            nbytes = header + pages.nbytes(kind)
            count = int(limit * share) // nbytes if share else 0
            if share and not count:
                raise PykernelsError(
                    f"{limit / 2**30:.2f} GiB of main memory for what leaves the GPU's cache hold"
                    f" no {kind.name.lower()}, which takes {nbytes / 2**20:.1f} MiB",
                    "Give a larger kv_ram_gib",
                )
            self.memory[kind] = pages.host(count * nbytes).reshape(count, nbytes)
            self._free[kind] = list(range(count - 1, -1, -1))

    def __contains__(self, name: str) -> bool:
        """Whether the block of this file's name is here."""
        return any(name in kept for kept in self._kept.values())

    def count(self, kind: Kind) -> int:
        """Blocks for which there is room."""
        return len(self.memory[kind])

    def has_free(self, kind: Kind) -> bool:
        """Whether one more takes no other's place."""
        return bool(self._free[kind])

    def find(self, block: BlockName) -> Bytes | None:
        """Its bytes, valid until the next ``room``; it is the most recently used one now."""
        value = self.value(block)
        return None if value is None else value[self.header :]

    def value(self, block: BlockName) -> Bytes | None:
        """``find``, with the room for its header in front."""
        kept = self._kept[block.kind]
        if block.file not in kept:
            return None
        kept.move_to_end(block.file)
        return self.memory[block.kind][kept[block.file]]

    def room(self, kind: Kind) -> Bytes:
        """Memory for another one, to be filled before ``keep``."""
        self._free[kind].append(self.take(kind))
        return self.memory[kind][self._free[kind][-1]][self.header :]

    def keep(self, block: BlockName) -> None:
        """What was put into the last ``room`` of its kind is this block."""
        place = self._free[block.kind].pop()
        if self.header:
            value = self.memory[block.kind][place]
            header = block.header([value[self.header :].data])
            value[self.header - len(header) : self.header] = np.frombuffer(header, np.uint8)
        self.give(block.kind, place, block)

    def take(self, kind: Kind) -> int:
        """A place in ``memory`` that is nobody else's until ``give``: of the block that was of use
        least recently, if need be."""
        free = self._free[kind]
        return free.pop() if free else self._kept[kind].popitem(last=False)[1]

    def give(self, kind: Kind, place: int, block: BlockName | None = None) -> None:
        """A place that was taken holds this block now; None: nothing."""
        free, kept = self._free[kind], self._kept[kind]
        if block is None:
            free.append(place)
            return
        if (before := kept.pop(block.file, None)) is not None:
            free.append(before)
        kept[block.file] = place

    def drop(self, block: BlockName) -> None:
        """Its place is free, if it has one."""
        if (place := self._kept[block.kind].pop(block.file, None)) is not None:
            self._free[block.kind].append(place)
