"""Pages and states of a device as bytes, the same on every device that has them in these dtypes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch


class PageStore(Protocol):
    """A device's cache, to be read and written block by block, beside its steps.

    One thread calls it. The caller sees to it that nobody writes a page or a slot meanwhile.

    Attributes:
        layout: what these bytes are, in a line.
        page_bytes: of a page in all layers; ``state_bytes``: of a slot.
    """

    layout: str
    page_bytes: int
    state_bytes: int

    def read_page(self, page: int) -> memoryview:
        """Its bytes, part by part as the model names them; valid until the next call."""

    def read_state(self, slot: int) -> memoryview:
        """Likewise of a slot of states."""

    def page_space(self, page: int) -> Sequence[memoryview]:
        """Where the bytes of a page are to be put, in order, before ``write_page``."""

    def write_page(self, page: int) -> None:
        """What lies in ``page_space`` is the page from now on."""

    def state_space(self, slot: int) -> Sequence[memoryview]:
        """Likewise of a slot of states."""

    def write_state(self, slot: int) -> None:
        """Likewise."""


class HostPages:
    """A cache in main memory: what is read into ``page_space`` is in its pages at once.

    Args:
        caches: by name, [pages or slots, ...], contiguous.
        states: the names of those that are states.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], states: Collection[str]) -> None:
        self.layout = layout_of(caches, states)
        self._pages = [_bytes_of(caches[name]) for name in caches if name not in states]
        self._states = [_bytes_of(caches[name]) for name in caches if name in states]
        self.page_bytes = sum(each.shape[1] for each in self._pages)
        self.state_bytes = sum(each.shape[1] for each in self._states)
        self._staging = np.empty(max(self.page_bytes, self.state_bytes), np.uint8)

    def read_page(self, page: int) -> memoryview:
        return self._read(self._pages, page)

    def read_state(self, slot: int) -> memoryview:
        return self._read(self._states, slot)

    def page_space(self, page: int) -> Sequence[memoryview]:
        return [each[page].data for each in self._pages]

    def write_page(self, page: int) -> None:
        return

    def state_space(self, slot: int) -> Sequence[memoryview]:
        return [each[slot].data for each in self._states]

    def write_state(self, slot: int) -> None:
        return

    def _read(self, parts: Sequence[np.ndarray], index: int) -> memoryview:
        at = 0
        for part in parts:
            self._staging[at : at + part.shape[1]] = part[index]
            at += part.shape[1]
        return self._staging[:at].data


def _bytes_of(cache: torch.Tensor) -> np.ndarray:
    """uint8 [pages or slots, bytes of one], the same memory."""
    found: np.ndarray = cache.flatten(1).view(torch.uint8).numpy()
    return found


def layout_of(caches: Mapping[str, torch.Tensor], states: Collection[str]) -> str:
    """What the bytes of a page and of a state are, in a line."""
    return "; ".join(
        f"{'state' if name in states else 'page'} {name} {cache.dtype} {list(cache.shape[1:])}"
        for name, cache in caches.items()
    )
