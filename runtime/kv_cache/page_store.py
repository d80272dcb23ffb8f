"""Pages and states of a device as bytes, the same on every device that has them in these dtypes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_SECTOR = 4096


class Kind(IntEnum):
    """The kinds of blocks, each read or written whole: a page of tokens, or a state behind them."""

    PAGE = 0
    STATE = 1


class PageStore(Protocol):
    """A device's cache, to be read and written page by page, and slot by slot, beside its steps.

    One thread calls it. The caller sees to it that nobody writes a page or a slot meanwhile.

    Attributes:
        layout: what the bytes of a page and of a state are, in a line.
    """

    layout: str

    def nbytes(self, kind: Kind) -> int:
        """Bytes of a block: a page in all layers, or a slot."""

    def host(self, nbytes: int) -> Bytes:
        """Main memory that crosses to the device and back fastest; the store keeps it."""

    def read(self, kind: Kind, place: int, out: Bytes) -> None:
        """Copies a page or a slot, part by part as the model names them."""

    def write(self, kind: Kind, place: int, data: Bytes) -> None:
        """The other way."""

    def space(self, kind: Kind, place: int) -> Sequence[memoryview] | None:
        """The memory of a page or a slot itself, in the same order; None: it is not the host's."""


class HostPages:
    """A cache in main memory.

    Args:
        caches: by name, [pages or slots, ...], contiguous.
        states: the names of those that are states.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], states: Collection[str]) -> None:
        self.layout = layout_of(caches, states)
        self._parts: dict[Kind, list[Bytes]] = {
            kind: [part.numpy() for part in parts]
            for kind, parts in parts_of(caches, states).items()
        }

    def nbytes(self, kind: Kind) -> int:
        return sum(part.shape[1] for part in self._parts[kind])

    def host(self, nbytes: int) -> Bytes:
        return aligned(nbytes)

    def read(self, kind: Kind, place: int, out: Bytes) -> None:
        at = 0
        for part in self._parts[kind]:
            out[at : at + part.shape[1]] = part[place]
            at += part.shape[1]

    def write(self, kind: Kind, place: int, data: Bytes) -> None:
        at = 0
        for part in self._parts[kind]:
            part[place] = data[at : at + part.shape[1]]
            at += part.shape[1]

    def space(self, kind: Kind, place: int) -> Sequence[memoryview] | None:
        return [part[place].data for part in self._parts[kind]]


def aligned(nbytes: int) -> Bytes:
    """Main memory that begins at a multiple of 4,096, where any disk can write by itself."""
    memory = np.empty(nbytes + _SECTOR, np.uint8)
    start = -memory.ctypes.data % _SECTOR
    return memory[start : start + nbytes]


def parts_of(
    caches: Mapping[str, torch.Tensor], states: Collection[str]
) -> dict[Kind, list[torch.Tensor]]:
    """uint8 [pages or slots, bytes of one] of each cache, the same memory."""
    parts: dict[Kind, list[torch.Tensor]] = {kind: [] for kind in Kind}
    for name, cache in caches.items():
        kind = Kind.STATE if name in states else Kind.PAGE
        parts[kind].append(cache.flatten(1).view(torch.uint8))
    return parts


def layout_of(caches: Mapping[str, torch.Tensor], states: Collection[str]) -> str:
    """What the bytes of a page and of a state are, in a line."""
    return "; ".join(
        f"{'state' if name in states else 'page'} {name} {cache.dtype} {list(cache.shape[1:])}"
        for name, cache in caches.items()
    )
