"""What requests leave behind: it is written when they give their pages back, as long as the pages
are not needed for others, to each level from which reading it again is not known to take longer
than computing it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence

from ..kv_cache import BlockManager
from ..kv_cache.page_store import Kind
from ..kv_cache.prefix import ROOT, PrefixNode
from .blocks.block import BlockName
from .levels import Levels
from .worker import Worker

_APART = 1000
"""Nanoseconds between the times at which a page and the one before it were of use: the deepest goes
first, as in the prefix tree."""


class Leaving:
    """Hears from the manager which pages and slots are left, and which are needed: see ``Below`` in
    ``kv_cache.block_manager`` and ``kv_cache.states``.

    Args:
        is_other: whether weights were changed, so that nothing is written any more.

    Attributes:
        filling: pages that are in the tree, and that a launched step is to fill.
    """

    def __init__(
        self,
        manager: BlockManager,
        levels: Levels,
        worker: Worker,
        fingerprint: bytes,
        is_other: Callable[[], bool],
    ) -> None:
        self._manager, self._levels, self._worker = manager, levels, worker
        self._fingerprint, self._is_other = fingerprint, is_other
        self.filling: set[PrefixNode] = set()
        self._states: dict[PrefixNode, int] = {}  # to be written once their copies are made
        own: Leaving = weakref.proxy(self)  # the manager does not keep it
        manager.below = own
        if manager.snapshots is not None:
            manager.snapshots.states.below = own

    def released(self, nodes: Sequence[PrefixNode]) -> None:
        if self._is_other():
            return
        now = time.time_ns()
        full = next((i for i, node in enumerate(nodes) if node in self.filling), len(nodes))
        nodes = nodes[:full]
        for i, node in enumerate(nodes):
            block = self._name(Kind.PAGE, node)
            if self._levels.have(block.file):
                self._worker.touch(block, now - i * _APART)
            else:
                self._worker.write(block, node.page, now - i * _APART)
        self._levels.counts.hope_to_write()
        snapshots = self._manager.snapshots
        if snapshots is not None:
            for i, node in enumerate(nodes):
                if node in snapshots.states:
                    self._states[node] = now - i * _APART

    def filled(self, nodes: Sequence[PrefixNode]) -> None:
        """Others wait for these pages: they are written while their sequence has them."""
        if self._is_other():
            return
        now = time.time_ns()
        for i, node in enumerate(nodes):
            block = self._name(Kind.PAGE, node)
            if not self._levels.have(block.file):
                self._worker.write(block, node.page, now - i * _APART)

    def evicted(self, page: int) -> None:
        self._worker.forget(Kind.PAGE, page)

    def dropped(self, node: PrefixNode, slot: int) -> None:
        self._states.pop(node, None)
        self._worker.forget(Kind.STATE, slot)

    def collect_states(self) -> None:
        """States whose copies are made by now are written."""
        if not self._states:
            return
        assert self._manager.snapshots is not None
        states = self._manager.snapshots.states
        coming = states.written.union(slot for _, slot in states.copies)
        for node, used in list(self._states.items()):
            slot = states.slot_of(node)
            if slot in coming:
                continue
            del self._states[node]
            block = self._name(Kind.STATE, node)
            if self._levels.have(block.file):
                self._worker.touch(block, used)
            else:
                self._worker.write(block, slot, used)

    def has_state(self, keys: Collection[bytes]) -> bool:
        """Whether a state of one of these pages is to be written; any thread may ask."""
        return any(node.key in keys for node in list(self._states))

    def _name(self, kind: Kind, node: PrefixNode) -> BlockName:
        parent = ROOT if node.parent is None else node.parent.key
        return BlockName(kind, self._fingerprint, node.key, parent, node.data)
