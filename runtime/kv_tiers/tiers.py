"""The levels behind a device's pages, as the scheduler has them.

They are part of the prefix tree: what a request can use of them is read into pages, which come into
the tree before the request is admitted, so nothing else knows where a page has come from. A request
that waits for that is overtaken by others. What it leaves behind is in ``leaving``.

A block is read where that is known to be faster than computing its tokens, or nothing is known yet.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..kv_cache import BlockManager, PageTable
from ..kv_cache.page_store import Kind
from ..kv_cache.prefix import ROOT, Held, PageKey, PrefixNode, leading
from ..kv_cache.states import NO_SLOT
from .block import SUFFIXES, BlockName
from .leaving import Leaving
from .levels import Levels
from .loading import Ask, Found, Load, Loading
from .stats import LevelStats, Rate
from .transfer.handover import Handover
from .worker import Worker

_PATIENCE_SECONDS = 30.0
"""That a request waits for blocks, where nobody knows what computing them takes."""
_LEAST_SECONDS = 1.0
"""The same, where it is known to take less."""
_ASK_SECONDS = 1.0
"""For a store to say what it has."""
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
        self._is_other = is_other
        self._worker = Worker(levels)
        self._compute_rate = Rate()  # tokens of prompts a second
        self._loads: dict[Load, Loading] = {}
        self._launched = self._ended = 0  # steps
        # What runs may still write to pages that a cancelled request has given back: a load begins
        # when so many steps have ended.
        self._begin_later: deque[tuple[int, Load]] = deque()
        self._asks: dict[PageTable, tuple[Ask, float]] = {}  # and when they are given up
        self._leaving = Leaving(manager, levels, self._worker, fingerprint, is_other)
        # At the process's end ``close`` comes first.
        weakref.finalize(self, self._worker.stop).atexit = False

    @property
    def loading(self) -> bool:
        """Whether blocks are being read, or asked for."""
        return bool(self._loads or self._asks)

    def figures(self) -> dict[str, LevelStats]:
        """A copy of the counts of each level."""
        levels = self._levels
        return {levels.title(name): replace(stats) for name, stats in levels.stats.items()}

    def held(self, keys: Sequence[bytes]) -> Held:
        """What there is of a prompt with these keys of its pages; any thread may ask."""
        cached = self._manager.cached(keys)
        if not self.shared:
            return Held(cached)
        pages, states = ([_file(kind, (key, b"")) for key in keys] for kind in Kind)
        stored = leading(pages, self._levels.stored)
        if self._manager.snapshots is not None:
            while stored and not self._levels.stored(states[stored - 1]):
                stored -= 1
        storing = self._leaving.has_state(keys) or self._worker.is_writing({*pages, *states})
        takes = not self._is_slow(len(keys) - cached)
        return Held(cached, stored, storing, takes)

    def _is_slow(self, pages: int) -> bool:
        """Whether so many pages were faster to compute than to read from the last level."""
        reads = self._levels.last_seconds(pages)
        computes = self._compute_rate.seconds(pages * self._manager.page_size)
        slow = reads is not None and computes is not None and reads > computes
        if slow:
            self._levels.hope()
        return slow

    def has_news(self) -> bool:
        """Whether ``collect`` has something to do."""
        return bool(self._worker.done) or any(ask.ended for ask, _ in self._asks.values())

    def close(self, seconds: float) -> None:
        """Writes what is to be written, for so long, and reads no more."""
        self._leaving.collect_states()
        self._worker.close(seconds)

    # What steps do.

    def launched(self, nodes: Iterable[PrefixNode]) -> None:
        """A step runs that is to fill these pages of the tree."""
        self._launched += 1
        self._leaving.filling.update(nodes)

    def ended(self) -> None:
        """The step that was launched first, of those that run, has ended, well or not."""
        self._ended += 1
        self._begin_loads()

    def filled(self, nodes: Sequence[PrefixNode]) -> None:
        """They hold what they should, or are not in the tree any more."""
        self._leaving.filling.difference_update(nodes)
        if self.shared:
            self._leaving.filled([node for node in nodes if node in self._manager.tree])

    def computed(self, tokens: int, seconds: float) -> None:
        """A step took so long for so many tokens of prompts."""
        if tokens >= self._manager.page_size:
            self._compute_rate.record(tokens, seconds)

    # What requests are given.

    def is_coming(
        self, table: PageTable, tokens: Sequence[int], reusable: int | None, reserve: int
    ) -> bool:
        """Whether a request that is to be admitted waits for blocks; it is asked again and again.

        Args:
            table: its own, empty; ``tokens``, ``reusable`` and ``reserve``: as for ``admit``.
        """
        now, manager = time.monotonic(), self._manager
        if not table.sought and manager.available <= reserve:
            return False  # it cannot be admitted either
        found = None if table.sought else self._found(table, tokens, reusable)
        if found is not None and found.missing and self._is_asking(table, found, now):
            return True
        for load, loading in self._loads.items():
            if not load.cancelled and loading.is_for(table):
                if now < loading.give_up:
                    return True
                load.cancelled = True
        if found is None:
            return False
        hits, depth, saved, state, missing = found
        keys = table.keys[len(hits) : depth]
        names = [(Kind.PAGE, _file(Kind.PAGE, key)) for key in keys]
        if state:
            names.append((Kind.STATE, _file(Kind.STATE, table.keys[depth - 1])))
        reads = self._levels.seconds(names)
        computes = self._compute_rate.seconds(saved * manager.page_size)
        slow = reads is not None and computes is not None and reads > computes
        begun = None
        if saved and not slow and not self._is_other():
            begun = self._load(table, hits, keys, state, reserve)
            if begun is None:
                return False  # pages are short
        table.sought = True
        if missing:
            self._levels.last.missed += sum(kind is Kind.PAGE for kind, _ in missing)
            self._worker.look()
        if slow:
            self._levels.hope()
            self._levels.last.declined += len(names)
        if begun is None:
            return False
        patience = _PATIENCE_SECONDS if computes is None else max(_LEAST_SECONDS, computes)
        last = depth - 1, table.keys[depth - 1]
        self._loads[begun] = Loading(begun, hits, keys, now + patience, last)
        self._begin_later.append((self._launched, begun))
        self._begin_loads()
        return True

    def _is_asking(self, table: PageTable, found: Found, now: float) -> bool:
        """Whether the store is still being asked for what no other level has."""
        if not self._levels.is_asked:
            return False
        if not table.asked:
            if any(now >= give_up for _, give_up in self._asks.values()):
                return False  # it does not answer
            ask = Ask([_file(kind, key) for kind, key in found.missing])
            table.asked, self._asks[table] = True, (ask, now + _ASK_SECONDS)
            self._worker.ask(ask)
        if (open_ask := self._asks.get(table)) is None:
            return False
        return not open_ask[0].ended and now < open_ask[1]

    def _begin_loads(self) -> None:
        while self._begin_later and self._begin_later[0][0] <= self._ended:
            self._worker.load(self._begin_later.popleft()[1])

    def collect(self) -> bool:
        """Brings what was read into the tree; whether there was anything."""
        self._leaving.collect_states()
        ended = [table for table, (ask, _) in self._asks.items() if ask.ended]
        for table in ended:
            del self._asks[table]
        any_done = bool(self._worker.done or ended)
        while self._worker.done:
            self._adopt(self._loads.pop(self._worker.done.popleft()))
        return any_done

    def _found(self, table: PageTable, tokens: Sequence[int], reusable: int | None) -> Found:
        """What is there of a prompt."""
        hits = self._manager.match(table, tokens, reusable)
        last, keys = self._manager.shareable(tokens, reusable), table.keys
        depth = len(hits)
        while depth < last and _file(Kind.PAGE, keys[depth]) in self._levels:
            depth += 1
        least, state = len(hits), False
        missing = [(Kind.PAGE, key) for key in keys[depth:last]]
        if (snapshots := self._manager.snapshots) is not None:
            least = len(snapshots.deepest(hits))
            missing += [(Kind.STATE, key) for key in keys[least:last]] if missing else []
            while depth > least and _file(Kind.STATE, keys[depth - 1]) not in self._levels:
                depth -= 1
            state = depth > least
            hits = hits[:depth]
        return Found(hits, depth, depth - least, state, missing)

    def _load(
        self,
        table: PageTable,
        hits: list[PrefixNode],
        keys: list[PageKey],
        state: bool,
        reserve: int,
    ) -> Load | None:
        """Pages for blocks that are to be read; None: there are too few."""
        pages = self._manager.reserve(hits, len(keys), reserve)
        if pages is None:
            return None
        last = hits[-1].key if hits else ROOT
        parents = [last, *(key for key, _ in keys)]
        blocks = [
            (BlockName(Kind.PAGE, self.fingerprint, key, parent, data), page)
            for (key, data), parent, page in zip(keys, parents, pages, strict=False)
        ]
        if not state:
            return Load(blocks)
        snapshots = self._manager.snapshots
        assert snapshots is not None
        slot = snapshots.states.take_apart()
        if slot == NO_SLOT:
            self._manager.adopt(hits, keys, pages, 0)
            return None
        at = len(hits) + len(keys)
        (key, data), before = table.keys[at - 1], table.keys[at - 2][0] if at > 1 else ROOT
        name = BlockName(Kind.STATE, self.fingerprint, key, before, data)
        return Load(blocks, (name, slot))

    def _adopt(self, done: Loading) -> None:
        load = done.load
        pages = [page for _, page in load.pages]
        deepest = self._manager.adopt(done.behind, done.keys, pages, load.loaded)
        if load.state is None:
            return
        block, slot = load.state
        snapshots = self._manager.snapshots
        assert snapshots is not None
        if load.has_state and deepest is not None and deepest.key == block.key:
            snapshots.states.keep(deepest, slot)
        else:
            snapshots.states.free(slot)


def _file(kind: Kind, key: PageKey) -> str:
    """Of the block of a page."""
    return key[0].hex() + SUFFIXES[kind]
