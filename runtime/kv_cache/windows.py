"""Pages of layers that attend to a window: a sequence has those that its next tokens see.

Layers without a window have a page for every run of tokens; beside it, layers with one have a page
from a pool of their own, while it lies in some sequence's window. What lies behind every window is
given back. While nobody needs the memory it stays as an *idle* page beside its page of the tree:
a prefix can be taken up again as far as its last window is there (as in vLLM's hybrid cache). Two
kinds of idle pages are kept longest: the last window of a sequence that has ended, and the window
in front of where another prompt may leave this one: what the tree knew of it, and its own end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from .page_table import PageTable
from .pages import PagePool
from .prefix import PrefixNode, PrefixTree

NONE = -1
_STEP_TOKENS = 4096
_PER_IDLE, _IDLE = 8, 3


def least_pages(max_num_seqs: int, window: int, page_size: int) -> int:
    """Pages with which every sequence goes on: its window, a page that is not full and the next
    one; and one for a prompt's chunk."""
    return max_num_seqs * (pages_ahead(window, page_size) + 2) + 1


def pool_pages(
    num_pages: int, window: int, max_num_seqs: int, step_tokens: int | None, page_size: int
) -> int:
    """Pages of layers with a window; 0: a pool of their own saves nothing.

    Beside what sequences must have, there are pages for the prompts of two steps, and for the ends
    of conversations: one for each ``_PER_IDLE`` of the other layers, but no more than those of
    ``_IDLE`` conversations a sequence.

    Args:
        num_pages: of the other layers.
        window: keys that a token sees; 0: there are no such layers.
        step_tokens: budget of a step; None: it is not chosen yet.
    """
    if not window:
        return 0
    tokens = 2 * (step_tokens or _STEP_TOKENS)
    least = least_pages(max_num_seqs, window, page_size)
    pages = least + -(-tokens // page_size) + min(-(-num_pages // _PER_IDLE), _IDLE * least)
    return pages if pages < num_pages else 0


def pages_ahead(window: int, page_size: int) -> int:
    """Pages in front of a page that its first token sees."""
    return -(-(window - 1) // page_size)


class WindowPages:
    """Deals pages of layers with a window.

    Args:
        tree: of the pages of other layers, beside which these lie; ``num_pages``: of them.
        window_pages: pages of the pool; ``page_size``: tokens of one.
        window: a token sees the last so many keys up to its own.
        max_num_seqs, max_pages: the shape of ``tables``.

    Attributes:
        tables: int64 [max_num_seqs, max_pages], as ``BlockManager.tables``. Only entries in a
            sequence's window are its own; all are page ids.
        ahead: pages in front of a page that its first token sees.
    """

    def __init__(
        self,
        tree: PrefixTree,
        num_pages: int,
        window_pages: int,
        page_size: int,
        window: int,
        max_num_seqs: int,
        max_pages: int,
    ) -> None:
        self.tree, self.page_size, self.reserve = tree, page_size, max_num_seqs
        self.pool = PagePool(window_pages)
        self.tables = np.zeros((max_num_seqs, max_pages), np.int64)
        self.ahead = pages_ahead(window, page_size)
        self._beside = [NONE] * num_pages  # by page of other layers
        # Pages of the tree beside which an idle page lies, the oldest first.
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._warm: OrderedDict[int, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages that no sequence has, kept for those to come."""
        return len(self._cold) + len(self._warm)

    @property
    def available(self) -> int:
        """Pages that can be had without taking one from a sequence."""
        return len(self.pool) + self.idle

    def usable(self, nodes: Sequence[PrefixNode]) -> int:
        """Leading pages of a cached prefix behind which a sequence can go on: their last window is
        there. Any thread may ask."""
        found = there = 0
        for i, node in enumerate(nodes):
            there = there + 1 if self._beside[node.page] != NONE else 0
            if there >= min(i + 1, self.ahead):
                found = i + 1
        return found

    def admit(self, table: PageTable, known: int, tokens: int) -> None:
        """A sequence of so many tokens goes on behind the ``table.cached`` pages that it shares.

        Args:
            known: pages of it that are in the tree.
        """
        end = table.cached
        table.window_first, table.window_end = max(0, end - self.ahead), end
        full = (tokens - 1) // self.page_size
        table.kept = [range(at - self.ahead, at) for at in (known, full)]
        for i in range(table.window_first, end):
            self.tables[table.row, i] = self._hold(table.pages[i])

    def reach(self, table: PageTable, pages: int, reserve: int) -> bool:
        """Gives a sequence pages up to its first so many, as far as more than ``reserve`` are
        available; whether any were given."""
        first = table.window_end
        for i in range(first, pages):
            if self.available <= reserve:
                break
            own = self._take()
            self.tables[table.row, i] = self._beside[table.pages[i]] = own
            table.window_end = i + 1
        return table.window_end > first

    def computed(self, table: PageTable, tokens: int) -> None:
        """Steps that compute a sequence's first ``tokens`` have ended: takes back what lies behind
        the window of the last page that is full, so that the sequence can be taken up there."""
        end = min(tokens // self.page_size - self.ahead, table.window_end)
        for i in range(table.window_first, end):
            self._drop(table, i, any(i in kept for kept in table.kept))
        table.window_first = max(table.window_first, end)

    def release(self, table: PageTable) -> None:
        """A sequence leaves, and its pages of other layers are its own still."""
        for i in range(table.window_first, table.window_end):
            self._drop(table, i, True)
        table.window_first = table.window_end = 0

    def replace(self, table: PageTable, index: int, page: int) -> bool:
        """A sequence goes on with another page of other layers, of the same tokens.

        Returns:
            Whether the page has got what the sequence has computed: there was none beside it.
        """
        if not table.window_first <= index < table.window_end:
            return False
        if self._beside[page] != NONE:
            self._drop(table, index, False)
            self.tables[table.row, index] = self._hold(page)
            return False
        own = int(self.tables[table.row, index])
        self._beside[table.pages[index]], self._beside[page] = NONE, own
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """What lies beside these pages of other layers is of no use: they have left the tree, or
        its contents are wrong. Sequences that have it must be released."""
        for page in pages:
            own, self._beside[page] = self._beside[page], NONE
            if own != NONE and not self.pool.references[own]:
                self._cold.pop(page, None)
                self._warm.pop(page, None)
                self.pool.free(own)

    def _take(self) -> int:
        if not len(self.pool):
            page, _ = (self._cold or self._warm).popitem(last=False)
            own, self._beside[page] = self._beside[page], NONE
            self.pool.free(own)
        return self.pool.allocate()

    def _hold(self, page: int) -> int:
        """One more sequence has the page beside a page of the tree, which has one."""
        own = self._beside[page]
        self._cold.pop(page, None)
        self._warm.pop(page, None)
        self.pool.share(own)
        return own

    def _drop(self, table: PageTable, index: int, keep: bool) -> None:
        own, page = int(self.tables[table.row, index]), table.pages[index]
        if not self.pool.release(own):
            return
        if self._beside[page] != own:  # forgotten meanwhile
            self.pool.free(own)
        elif self.tree.has(page):
            (self._warm if keep else self._cold)[page] = None
        else:
            self._beside[page] = NONE
            self.pool.free(own)
