"""Blocks in main memory beside a GPU, the least recently used of which give way."""

from __future__ import annotations

from collections import OrderedDict

from pykernels.errors import PykernelsError

from ..kv_cache.page_store import Bytes, Kind, PageStore
from .block import BlockName

_STATES = 0.5
"""Of the memory, where layers have states."""


class RamBlocks:
    """As many blocks as there is memory for; where layers have states, half of it is for those.

    Args:
        pages: of the device, which makes the memory.
        limit: bytes.

    Raises:
        PykernelsError: there is no room for one page, or one state.
    """

    def __init__(self, pages: PageStore, limit: int) -> None:
        self._memory: dict[Kind, Bytes] = {}
        self._free: dict[Kind, list[int]] = {}
        self._kept: dict[Kind, OrderedDict[str, int]] = {kind: OrderedDict() for kind in Kind}
        states = pages.nbytes(Kind.STATE)
        shares = {Kind.PAGE: 1 - _STATES * bool(states), Kind.STATE: _STATES * bool(states)}
        for kind, share in shares.items():
            nbytes = pages.nbytes(kind)
            count = int(limit * share) // nbytes if share else 0
            if share and not count:
                raise PykernelsError(
                    f"{limit / 2**30:.2f} GiB of main memory for what leaves the GPU's cache hold"
                    f" no {kind.name.lower()}, which takes {nbytes / 2**20:.1f} MiB",
                    "Give a larger kv_ram_gib",
                )
            self._memory[kind] = pages.host(count * nbytes).reshape(count, nbytes)
            self._free[kind] = list(range(count - 1, -1, -1))

    @property
    def pages(self) -> int:
        """How many there is room for."""
        return len(self._memory[Kind.PAGE])

    def __contains__(self, name: str) -> bool:
        """Whether the block of this file's name is here."""
        return any(name in kept for kept in self._kept.values())

    def find(self, block: BlockName) -> Bytes | None:
        """Its bytes, valid until the next ``room``; it is the most recently used one now."""
        kept = self._kept[block.kind]
        if block.file not in kept:
            return None
        kept.move_to_end(block.file)
        return self._memory[block.kind][kept[block.file]]

    def room(self, kind: Kind) -> Bytes:
        """Memory for another one, to be filled before ``keep``."""
        free, kept = self._free[kind], self._kept[kind]
        if not free:
            free.append(kept.popitem(last=False)[1])
        return self._memory[kind][free[-1]]

    def keep(self, block: BlockName) -> None:
        """What was put into the last ``room`` of its kind is this block."""
        kept, free = self._kept[block.kind], self._free[block.kind]
        filled, before = free.pop(), kept.pop(block.file, None)
        kept[block.file] = filled
        if before is not None:
            free.append(before)
