"""The levels behind a device's pages, as the scheduler has them.

They are part of the prefix tree: what a request can use of them is read into pages, which come into
the tree before the request is admitted, so nothing else knows where a page has come from. A request
that waits for that is overtaken by others (``seeking``). What it leaves behind is in ``leaving``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..kv_cache import BlockManager, PageTable
from ..kv_cache.page_store import Kind
from ..kv_cache.prefix import Held, PrefixNode, leading
from .leaving import Leaving
from .levels import Levels
from .seeking import Seeking, file_of
from .stats import LevelStats, Rate
from .transfer.handover import Handover
from .worker import Worker

CLOSE_SECONDS = 30.0
"""For what is to be written when the engine ends."""


class KvTiers:
    """What the pages of one engine have behind them.

    Every method is called by the thread that owns the scheduler.

    Args:
        manager: of the pages; it tells of those that are given back, and evicted.
        levels: behind them; ``fingerprint``: of the model, as its blocks have it.
        is_other: whether weights were changed, so that it is another model's; then nothing is read
            or written any more.
        shared: other engines wait for what this one fills; then its states are kept at the end of
            each prompt.
        handover: how it shares them; None: nobody asks.
    """

    def __init__(
        self,
        manager: BlockManager,
        levels: Levels,
        fingerprint: bytes,
        is_other: Callable[[], bool] = lambda: False,
        shared: bool = False,
        handover: Handover | None = None,
    ) -> None:
        self.shared, self.handover = shared, handover
        self._manager, self._levels, self.fingerprint = manager, levels, fingerprint
        self._worker = worker = Worker(levels)
        self._compute_rate = rate = Rate()  # tokens of prompts a second
        self._seeking = Seeking(manager, levels, worker, fingerprint, rate, is_other)
        self._leaving = Leaving(manager, levels, self._worker, fingerprint, is_other)
        # At the process's end ``close`` comes first.
        weakref.finalize(self, self._worker.stop).atexit = False

    @property
    def loading(self) -> bool:
        """Whether blocks are being read, or asked for."""
        return self._seeking.loading

    def figures(self) -> dict[str, LevelStats]:
        """A copy of the counts of each level."""
        counts, title = self._levels.counts, self._levels.title
        return {title(name): replace(stats) for name, stats in counts.stats.items()}

    def held(self, keys: Sequence[bytes]) -> Held:
        """What there is of a prompt with these keys of its pages; any thread may ask."""
        cached = self._manager.cached(keys)
        if not self.shared:
            return Held(cached)
        pages, states = ([file_of(kind, (key, b"")) for key in keys] for kind in Kind)
        stored = leading(pages, self._levels.stored)
        if self._manager.snapshots is not None:
            while stored and not self._levels.stored(states[stored - 1]):
                stored -= 1
        storing = self._leaving.has_state(keys) or self._worker.is_writing({*pages, *states})
        takes = not self._is_slow(len(keys) - cached)
        return Held(cached, stored, storing, takes)

    def _is_slow(self, pages: int) -> bool:
        """Whether so many pages were faster to compute than to read from the last level."""
        reads = self._levels.counts.last_seconds(pages)
        computes = self._compute_rate.seconds(pages * self._manager.page_size)
        slow = reads is not None and computes is not None and reads > computes
        if slow:
            self._levels.counts.hope()
        return slow

    def has_news(self) -> bool:
        """Whether ``collect`` has something to do."""
        return self._seeking.has_news

    def close(self, seconds: float) -> None:
        """Writes what is to be written, for so long, and reads no more."""
        self._leaving.collect_states()
        self._worker.close(seconds)

    # What steps do.

    def launched(self, nodes: Iterable[PrefixNode]) -> None:
        """A step runs that is to fill these pages of the tree."""
        self._seeking.launched()
        self._leaving.filling.update(nodes)

    def ended(self) -> None:
        """The step that was launched first, of those that run, has ended, well or not."""
        self._seeking.ended()

    def filled(self, nodes: Sequence[PrefixNode]) -> None:
        """They hold what they should, or are not in the tree any more."""
        self._leaving.filling.difference_update(nodes)
        if self.shared:
            self._leaving.filled([node for node in nodes if node in self._manager.tree])

    def computed(self, tokens: int, seconds: float) -> None:
        """A step took so long for so many tokens of prompts."""
        if tokens >= self._manager.page_size:
            self._compute_rate.record(tokens, seconds)
            page = self._manager.page_size
            self._levels.counts.page_seconds = self._compute_rate.seconds(page)

    # What requests are given.

    def is_coming(
        self,
        table: PageTable,
        tokens: Sequence[int],
        reusable: int | None,
        reserve: int,
        early: bool = False,
    ) -> bool:
        """Whether a request that waits is to be admitted later: see ``Seeking.is_coming``."""
        return self._seeking.is_coming(table, tokens, reusable, reserve, early)

    def leaves(self, table: PageTable) -> None:
        """A request has got pages of its own, or wants none any more."""
        self._seeking.leaves(table)

    def collect(self) -> bool:
        """Brings what was read into the tree; whether there was anything."""
        self._leaving.collect_states()
        return self._seeking.collect()
