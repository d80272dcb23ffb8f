"""Memory that a node lends to others: a table of what is in its slots, and the slots.

Others copy the table to find a block, and then its slot; nobody asks this process. A slot is a
block as a file has it, header and payload (``block``): who has copied one while it was written sees
that its checksum is wrong.

    the table: 16 bytes a slot, the block's key, or zeros; pages first, states behind them
    zeros up to ``ALIGN``; the slots of pages, those of states
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import numpy as np

from pykernels.errors import PykernelsError

from ...kv_cache.page_store import Bytes, Kind, PageStore
from ...kv_cache.prefix import KEY_BYTES
from ..blocks.block import ALIGN, SUFFIXES, BlockName, header_bytes

_STATES = 0.5
"""Of the memory, where layers have states."""
_WANTED_SECONDS = 5.0
"""For which a block is kept: the node that waits for it has copied it then."""


@dataclass(frozen=True)
class Layout:
    """Where things are in such memory.

    Attributes:
        slots: of each kind; ``sizes``: bytes of a slot of it.
    """

    slots: tuple[int, int]
    sizes: tuple[int, int]

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        return sum(self.slots) * KEY_BYTES

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.offset(Kind.STATE, self.slots[Kind.STATE])

    def row(self, kind: Kind, slot: int) -> int:
        """Of a slot in the table."""
        return slot + (self.slots[Kind.PAGE] if kind is Kind.STATE else 0)

    def offset(self, kind: Kind, slot: int) -> int:
        """Where a slot begins."""
        start = -(-self.table_bytes // ALIGN) * ALIGN
        if kind is Kind.STATE:
            start += self.slots[Kind.PAGE] * self.sizes[Kind.PAGE]
        return start + slot * self.sizes[kind]

    def found(self, table: Bytes) -> dict[str, tuple[Kind, int]]:
        """Names of blocks' files, and the slots that a table says they are in."""
        keys = table[: self.table_bytes].tobytes()
        where = ((kind, slot) for kind in Kind for slot in range(self.slots[kind]))
        found = {}
        for at, place in zip(count(step=KEY_BYTES), where, strict=False):
            if any(key := keys[at : at + KEY_BYTES]):
                found[key.hex() + SUFFIXES[place[0]]] = place
        return found


def slot_sizes(pages: PageStore, page_size: int) -> tuple[int, int]:
    """Bytes of a slot of each kind: multiples of ``ALIGN``."""
    head = header_bytes(page_size * np.dtype(np.int32).itemsize)
    page, state = (pages.nbytes(kind) for kind in Kind)
    return _aligned(head + page), _aligned(head + state) if state else 0


class LentBlocks:
    """Blocks of this process in such memory; the oldest give way to new ones.

    Args:
        pages: of the device, which makes the memory; ``page_size``: tokens of a page.
        limit: bytes.

    Attributes:
        memory: all of it; ``layout``: what is where.

    Raises:
        PykernelsError: there is no room for one page, or one state.
    """

    def __init__(self, pages: PageStore, page_size: int, limit: int) -> None:
        sizes = slot_sizes(pages, page_size)
        shares = (1 - _STATES, _STATES) if sizes[Kind.STATE] else (1.0, 0.0)
        each = [
            int(limit * share) // (size + KEY_BYTES) if share else 0
            for share, size in zip(shares, sizes, strict=True)
        ]
        for kind in Kind:
            if shares[kind] and not each[kind]:
                raise PykernelsError(
                    f"{limit / 2**30:.2g} GiB that other nodes read hold no {kind.name.lower()},"
                    f" which takes {sizes[kind] / 2**20:.1f} MiB",
                    "Give a larger kv_transfer_gib",
                )
        self.layout = Layout((each[0], each[1]), sizes)
        self.memory = pages.host(self.layout.nbytes)
        rows = self.memory[: self.layout.table_bytes]
        rows[:] = 0
        self._table = rows.reshape(-1, KEY_BYTES)
        self._free = {kind: list(range(each[kind] - 1, -1, -1)) for kind in Kind}
        self._kept: dict[Kind, OrderedDict[str, tuple[int, float]]] = {
            kind: OrderedDict() for kind in Kind
        }

    def __contains__(self, name: str) -> bool:
        """Whether others find the block of this file's name."""
        return any(name in kept for kept in self._kept.values())

    def put(self, block: BlockName, data: Bytes) -> str | None:
        """Lends a block.

        Returns:
            The name of the one that gave way to it; "": none.  None: there is no room, since
            others have not had the time to copy what is there.
        """
        kind, gone = block.kind, ""
        kept, free = self._kept[kind], self._free[kind]
        if not free:
            gone, (slot, since) = next(iter(kept.items()))
            if time.monotonic() - since < _WANTED_SECONDS:
                return None
            del kept[gone]
            free.append(slot)
        slot = free.pop()
        row = self._table[self.layout.row(kind, slot)]
        row[:] = 0
        header = block.header([data.data])
        place = self._slot(kind, slot)
        place[len(header) : len(header) + len(data)] = data
        place[: len(header)] = np.frombuffer(header, np.uint8)
        row[:] = np.frombuffer(block.key, np.uint8)
        kept[block.file] = slot, time.monotonic()
        return gone

    def find(self, block: BlockName) -> Bytes | None:
        """A block's slot, which others may have written to."""
        if (found := self._kept[block.kind].get(block.file)) is None:
            return None
        return self._slot(block.kind, found[0])

    def drop(self, block: BlockName) -> None:
        """Others do not find it any more, if it was here."""
        if (found := self._kept[block.kind].pop(block.file, None)) is not None:
            self._table[self.layout.row(block.kind, found[0])] = 0
            self._free[block.kind].append(found[0])

    def _slot(self, kind: Kind, slot: int) -> Bytes:
        at = self.layout.offset(kind, slot)
        return self.memory[at : at + self.layout.sizes[kind]]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
