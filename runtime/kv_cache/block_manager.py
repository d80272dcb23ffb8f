"""What running sequences have of the cache: admission, growth, sharing and release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from .page_table import PageTable
from .pages import PagePool
from .prefix import PageKey, PrefixNode, PrefixTree, extend_keys, path_to
from .snapshots import Snapshots
from .states import NO_SLOT, StateSlots
from .windows import WindowPages


class Below(Protocol):
    """A level behind the pages, which is told what becomes of them."""

    def released(self, nodes: Sequence[PrefixNode]) -> None:
        """A sequence gives back pages of the tree, from the root on."""

    def evicted(self, page: int) -> None:
        """A page is not in the tree any more, and may be written from now on."""


class BlockManager:
    """Deals pages to sequences; full pages are shared through the prefix tree.

    A page in the tree is full and is never written again. So sequences share whole pages without
    copies, and what they write lies behind, in pages of their own. Where layers have states, a
    sequence has a slot for its own, and a prefix is shared as far as there is a snapshot. Layers
    with a window may have pages of their own (``WindowPages``).

    Args:
        num_pages: pages of the cache.
        page_size: tokens a page.
        max_num_seqs: rows of ``tables``: sequences that hold pages at the same time.
        max_pages: columns of ``tables``: pages of the longest sequence.
        state_slots: of states; 0: layers have none.
        spacing: pages from one snapshot in a prompt to the next; 0: no snapshots.
        window_pages: of layers with a window; 0: they have ``num_pages`` like the others.
        window: keys that a token of these layers sees.

    Attributes:
        snapshots: None: layers have no states.
        windows: None: no layer has pages of its own.
        tables: int64 [max_num_seqs, max_pages]; row ``table.row`` holds ``table.pages``. Entries
            behind them are old, but always page ids.
        version: grows with every change of ``tables``.
        below: the next level; None: there is none.
    """

    below: Below | None = None

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_pages: int,
        state_slots: int = 0,
        spacing: int = 0,
        window_pages: int = 0,
        window: int = 0,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree()
        self.tables = np.zeros((max_num_seqs, max_pages), np.int64)
        self.version = 0
        self.snapshots: Snapshots | None = None
        if state_slots:
            most = (state_slots - max_num_seqs) // 2
            self.snapshots = Snapshots(StateSlots(state_slots), page_size, spacing, most)
        self.windows: WindowPages | None = None
        if window_pages:
            assert not state_slots, "a prefix ends at a snapshot, or with a window"
            shape = self.tables.shape
            self.windows = WindowPages(
                self.tree, num_pages, window_pages, page_size, window, *shape
            )
        self._rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def available(self) -> int:
        """Pages that can be had without taking one from a sequence."""
        return len(self.pool) + self.tree.idle

    def idle(self, nodes: Iterable[PrefixNode]) -> int:
        """How many of these pages no page table names."""
        return sum(not self.pool.references[node.page] for node in nodes)

    def is_coming(
        self,
        table: PageTable,
        tokens: Sequence[int],
        others: Iterable[PageTable],
        reusable: int | None = None,
    ) -> bool:
        """True if a running prefill is computing this request's next page, or the next state that
        it can go on from.

        Then the request waits and shares that, instead of computing it a second time.
        """
        known = self.match(table, tokens, reusable)
        last = self.shareable(tokens, reusable)
        if self.snapshots is not None:
            first = len(self.snapshots.deepest(known))
            coming = [(mark, other) for other in others for mark in other.marks if mark > first]
        elif self.windows is not None:  # what the tree knows may be computed again
            first = self.windows.usable(known)
            coming = [(other.cached + 1, other) for other in others if other.cached >= first]
        else:
            coming = [(len(known) + 1, other) for other in others]
        return any(
            pages <= min(last, len(other.keys)) and other.keys[pages - 1] == table.keys[pages - 1]
            for pages, other in coming
        )

    def admit(
        self,
        table: PageTable,
        tokens: Sequence[int],
        reserve: int = 0,
        reusable: int | None = None,
    ) -> bool:
        """Give a sequence pages for all its tokens, the longest cached prefix among them.

        At least the last token is left to compute. ``table.cached`` says how many pages need no
        computing.

        Args:
            table: an empty one.
            tokens: prompt, and what was generated before a preemption.
            reserve: pages that must be left available.
            reusable: most leading tokens that may come from the cache; None: all but the last.

        Returns:
            Whether the pages were there; if not, nothing has changed.
        """
        hits = known = self.match(table, tokens, reusable)
        if self.snapshots is not None:
            hits = self.snapshots.deepest(known)
            if not self.snapshots.states.available:
                return False
        if self.windows is not None:
            hits = known[: self.windows.usable(known)]
        fresh = -(-len(tokens) // self.page_size) - len(hits)
        # Idle pages that are hit stop being available as well.
        idle = self.idle(hits)
        if not self._rows or fresh + idle + reserve > self.available:
            return False
        for node in hits:
            self._hold(node.page)
        # Hits are held by now: none of them can be evicted for the others.
        pages = [node.page for node in hits] + [self._take() for _ in range(fresh)]
        table.pages, table.row = pages, self._rows.pop()
        table.cached, table.node = len(hits), hits[-1] if hits else None
        if self.snapshots is not None:
            self.snapshots.mark(table, len(hits), len(known), len(tokens))
            table.source = table.node
            table.slot = self.snapshots.states.begin(table.source)
        if self.windows is not None:
            self.windows.admit(table, len(known), len(tokens))
        self.tables[table.row, : len(pages)] = pages
        self.version += 1
        return True

    def extend(self, table: PageTable) -> bool:
        """One page more at the end; False if there is none to be had."""
        if not self.available or (self.windows is not None and not self.windows.available):
            return False
        page = self._take()
        self.tables[table.row, len(table.pages)] = page
        table.pages.append(page)
        if self.windows is not None:
            self.windows.reach(table, len(table.pages), 0)
        self.version += 1
        return True

    def reach(self, table: PageTable, end: int) -> int:
        """Gives a sequence of a prompt what layers with a window need of pages for its tokens up
        to ``end``; returns up to where there are some now. All others has ``admit`` given."""
        if self.windows is None:
            return end
        # Each sequence that decodes may need a page more.
        if self.windows.reach(table, -(-end // self.page_size), self.windows.reserve):
            self.version += 1
        return min(end, table.window_end * self.page_size)

    def computed(self, table: PageTable, tokens: int) -> None:
        """Steps have ended that compute a sequence's first ``tokens``: what lies behind a window
        is taken back."""
        if self.windows is not None:
            self.windows.computed(table, tokens)

    def commit(
        self,
        table: PageTable,
        tokens: Sequence[int],
        computed: int,
        completed: list[PrefixNode] | None = None,
    ) -> list[PrefixNode]:
        """Put the full pages among the first ``computed`` tokens into the tree.

        If another sequence has computed the same page in the meantime, this one goes on with
        that page and gives its own back.

        Args:
            completed: takes nodes that were there, and get what layers with a window lacked.

        Returns:
            The nodes that are new, from the root on.
        """
        inserted: list[PrefixNode] = []
        full = computed // self.page_size
        extend_keys(table.keys, tokens, full, self.page_size, table.output_from)
        while table.cached < full:
            i = table.cached
            if i and table.node is None:
                break  # behind a collision: its own pages stay its own
            node = self.tree.find(table.node, table.keys[i])
            if node is not None:
                if self._replace(table, i, node.page) and completed is not None:
                    completed.append(node)
            else:
                node = self.tree.insert(table.node, table.keys[i], table.pages[i])
                if node is not None:
                    inserted.append(node)
            table.node = node
            table.cached += 1
        return inserted

    def forget(self, nodes: Iterable[PrefixNode]) -> set[int]:
        """Take pages out of the tree whose contents turned out wrong; returns them.

        Sequences that hold one of them must release their tables next.
        """
        pages: set[int] = set()
        for node in nodes:
            if self.tree.remove(node):
                pages.add(node.page)
                self._left(node)
                if not self.pool.references[node.page]:
                    self.pool.free(node.page)
        return pages

    def save_in_step(self, table: PageTable, first: int, last: int) -> tuple[int, int]:
        """See ``Snapshots.save_in_step``."""
        if self.snapshots is None:
            return 0, NO_SLOT
        return self.snapshots.save_in_step(table, first, last)

    def chunk_end(self, table: PageTable) -> int | None:
        """The token in front of which a sequence's next chunk must end; None: anywhere."""
        return None if self.snapshots is None else self.snapshots.chunk_end(table)

    def forget_snapshots(self, nodes: Iterable[PrefixNode]) -> None:
        """Take away snapshots whose contents turned out wrong."""
        for node in nodes:
            self._drop_snapshot(node)

    def forget_windows(self, nodes: Iterable[PrefixNode]) -> set[int]:
        """Take away what layers with a window have at pages whose contents turned out wrong there;
        returns the pages, see ``forget``."""
        pages = {node.page for node in nodes if node in self.tree}
        if self.windows is not None:
            self.windows.forget(pages)
        return pages

    def release(self, table: PageTable) -> None:
        """Take all pages back; full ones stay in the tree until they are evicted."""
        if table.row < 0:
            return
        if self.windows is not None:
            self.windows.release(table)
        if self.below is not None:
            self.below.released(path_to(table.node))
        for page in reversed(table.pages):  # deepest first: see PrefixTree
            self._drop(page)
        if self.snapshots is not None:
            self.snapshots.release(table)
        self._rows.append(table.row)
        table.pages, table.row, table.cached, table.node = [], -1, 0, None

    def reserve(self, hits: Sequence[PrefixNode], fresh: int, reserve: int) -> list[int] | None:
        """Pages to be filled from another level, and then given to ``adopt``.

        Args:
            hits: cached ones in front of them, which stay meanwhile.
            reserve: pages that must be left available.

        Returns:
            None, and nothing has changed, if there are too few.
        """
        if fresh + self.idle(hits) + reserve > self.available:
            return None
        for node in hits:
            self._hold(node.page)
        return [self._take() for _ in range(fresh)]

    def adopt(
        self, hits: Sequence[PrefixNode], keys: Sequence[PageKey], pages: list[int], full: int
    ) -> PrefixNode | None:
        """Puts reserved pages into the tree, of which the first ``full`` are filled, and takes the
        others back.

        Args:
            keys: of all of them.

        Returns:
            The deepest page that is in the tree; None: none is.
        """
        node = hits[-1] if hits else None
        if node is not None and node not in self.tree:
            node, full = None, 0  # a step that should have filled it has failed
        pages = pages.copy()
        for i in range(full):
            found = self.tree.find(node, keys[i])
            if found is not None:  # computed meanwhile
                self._hold(found.page)
                self._drop(pages[i])
                pages[i] = found.page
            elif (found := self.tree.insert(node, keys[i], pages[i])) is None:
                break
            node = found
        for page in reversed([*(hit.page for hit in hits), *pages]):
            self._drop(page)
        return node

    def cached(self, keys: Sequence[bytes]) -> int:
        """Leading pages with these keys that a sequence could go on from; any thread may ask."""
        found = self.tree.known(keys)
        if self.snapshots is not None:
            found = self.snapshots.deepest(found)
        return len(found) if self.windows is None else self.windows.usable(found)

    def shareable(self, tokens: Sequence[int], reusable: int | None) -> int:
        """Most leading pages that may come from the cache: the last token is always computed."""
        return (len(tokens) - 1 if reusable is None else reusable) // self.page_size

    def match(
        self, table: PageTable, tokens: Sequence[int], reusable: int | None
    ) -> list[PrefixNode]:
        """The longest prefix of a request that is cached, from the root on; extends its keys to all
        that may be. See ``admit``."""
        limit = self.shareable(tokens, reusable)
        extend_keys(table.keys, tokens, limit, self.page_size, table.output_from)
        return self.tree.match(table.keys, limit)

    def _take(self) -> int:
        if not len(self.pool):
            node = self.tree.evict()
            self._left(node)
            self.pool.free(node.page)
        return self.pool.allocate()

    def _left(self, node: PrefixNode) -> None:
        """A page has left the tree."""
        self._drop_snapshot(node)
        if self.windows is not None:
            self.windows.forget((node.page,))
        if self.below is not None:
            self.below.evicted(node.page)

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if self.snapshots is not None:
            self.snapshots.states.drop(node)

    def _hold(self, page: int) -> None:
        self.pool.share(page)
        self.tree.hold(page)

    def _drop(self, page: int) -> None:
        if self.pool.release(page) and not self.tree.keep(page):
            self.pool.free(page)

    def _replace(self, table: PageTable, index: int, page: int) -> bool:
        """Whether the page has got what layers with a window lacked."""
        completed = self.windows is not None and self.windows.replace(table, index, page)
        own, table.pages[index] = table.pages[index], page
        self._hold(page)
        self._drop(own)
        self.tables[table.row, index] = page
        self.version += 1
        return completed
