"""What requests that wait are given of the levels behind the pages.

Reads begin when a request is queued, next to steps of others: into pages that nobody needs, and
that no other request which waits was given; where there are none, into main memory
(``Levels.bring``). A block is read where that is known to be faster than computing its tokens, or
nothing is known yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from ..kv_cache import BlockManager, PageTable
from ..kv_cache.page_store import Kind
from ..kv_cache.prefix import ROOT, PageKey, PrefixNode
from ..kv_cache.states import NO_SLOT
from .blocks.block import SUFFIXES, BlockName
from .levels import Levels
from .loading import Ask, Found, Load, Loading, Stage
from .stats import Rate
from .waiting import Wait, Waiting
from .worker import Worker

_PATIENCE_SECONDS = 30.0
"""That a request waits for blocks, where nobody knows what computing them takes."""
_LEAST_SECONDS = 1.0
"""The same, where it is known to take less."""
_ASK_SECONDS = 1.0
"""For a store to say what it has."""
_SEEKS = 3
"""Times that a request's prefix is sought, where pages that were filled for it had to go again."""


class Seeking:
    """Seeks prefixes of requests, and brings what is found.

    Args:
        manager: of the pages; ``levels``: behind them; ``worker``: that moves blocks.
        fingerprint: of the model, as its blocks have it.
        compute_rate: tokens of prompts a second.
        is_other: whether weights were changed; then nothing is read any more.
    """

    def __init__(
        self,
        manager: BlockManager,
        levels: Levels,
        worker: Worker,
        fingerprint: bytes,
        compute_rate: Rate,
        is_other: Callable[[], bool],
    ) -> None:
        self._manager, self._levels, self._worker = manager, levels, worker
        self._fingerprint, self._compute_rate = fingerprint, compute_rate
        self._is_other = is_other
        self._loads: dict[Load, Loading] = {}
        self._waiting = Waiting()
        self._launched = self._ended = 0  # steps
        # What runs may still write to pages that a cancelled request has given back: a load begins
        # when so many steps have ended.
        self._begin_later: deque[tuple[int, Load]] = deque()
        self._asks: dict[PageTable, tuple[Ask, float]] = {}  # and when they are given up

    @property
    def loading(self) -> bool:
        """Whether blocks are being read, or asked for."""
        return bool(self._loads or self._asks)

    @property
    def has_news(self) -> bool:
        """Whether ``collect`` has something to do."""
        return bool(self._worker.done) or any(ask.ended for ask, _ in self._asks.values())

    def launched(self) -> None:
        """A step runs."""
        self._launched += 1

    def ended(self) -> None:
        """The step that was launched first, of those that run, has ended."""
        self._ended += 1
        self._begin_loads()

    def collect(self) -> bool:
        """Brings what was read into the tree; whether there was anything."""
        ended = [table for table, (ask, _) in self._asks.items() if ask.ended]
        for table in ended:
            del self._asks[table]
        any_done = bool(self._worker.done or ended)
        while self._worker.done:
            self._adopt(self._loads.pop(self._worker.done.popleft()))
        return any_done

    def is_coming(
        self,
        table: PageTable,
        tokens: Sequence[int],
        reusable: int | None,
        reserve: int,
        early: bool = False,
    ) -> bool:
        """Whether a request that waits is to be admitted later, as blocks of it come; it is asked
        again and again.

        Args:
            table: its own, empty; ``tokens``, ``reusable`` and ``reserve``: as for ``admit``.
            early: it is not its turn yet.
        """
        now, wait = time.monotonic(), self._waiting[table]
        if wait.sought and (early or not self._has_lost(wait, table)):
            return self._is_loading(table, now)
        room = self._manager.available - reserve
        if early:
            room -= self._waiting.filled - wait.filled
        if room < (wait.lacks if early else 1) and (wait.near or self._near_room <= 0):
            return False  # it cannot be admitted either
        found = self._found(table, tokens, reusable)
        if found.missing and self._is_asking(table, wait, found, now):
            return True
        if self._is_loading(table, now):
            return True
        return self._seek(table, wait, found, room, reserve, now)

    def leaves(self, table: PageTable) -> None:
        """A request has got pages of its own, or wants none any more."""
        self._waiting.leave(table)

    def _has_lost(self, wait: Wait, table: PageTable) -> bool:
        """Whether pages are not in the tree any more that were when it was sought last."""
        if wait.load is not None or not wait.depth or wait.sought >= _SEEKS:
            return False
        hits = self._manager.tree.match(table.keys, wait.depth)
        if (snapshots := self._manager.snapshots) is not None:
            hits = snapshots.deepest(hits)
        return len(hits) < wait.depth

    def _is_loading(self, table: PageTable, now: float) -> bool:
        """Whether a load brings what a request begins with, and is not given up."""
        for load, loading in self._loads.items():
            if not load.cancelled and loading.is_for(table):
                if now < loading.give_up:
                    return True
                load.cancelled = True
        return False

    def _seek(
        self, table: PageTable, wait: Wait, found: Found, room: int, reserve: int, now: float
    ) -> bool:
        """Whether a load has begun that brings what was found."""
        hits, depth, saved, state, missing = found
        keys, levels = table.keys[len(hits) : depth], self._levels
        names = [(Kind.PAGE, file_of(Kind.PAGE, key)) for key in keys]
        if state:
            names.append((Kind.STATE, file_of(Kind.STATE, table.keys[depth - 1])))
        reads = levels.seconds(names)
        computes = self._compute_rate.seconds(saved * self._manager.page_size)
        slow = reads is not None and computes is not None and reads > computes
        begun = None
        if saved and not slow and not self._is_other():
            lacks = len(keys) + self._manager.idle(hits)
            if lacks <= room:
                begun = self._load(table, hits, keys, state, reserve)
            if begun is None:
                wait.lacks = lacks
                self._stage(wait, self._blocks(table, len(hits), depth, state))
                return False  # pages are short
        if missing and not wait.sought:
            levels.counts.last.missed += sum(kind is Kind.PAGE for kind, _ in missing)
            self._worker.look()
        if slow:
            levels.counts.hope()
            levels.counts.last.declined += len(names)
        wait.sought += 1
        wait.depth, wait.load = depth - saved, begun
        if begun is None:
            return False
        patience = _PATIENCE_SECONDS if computes is None else max(_LEAST_SECONDS, computes)
        last = depth - 1, table.keys[depth - 1]
        self._loads[begun] = Loading(begun, hits, keys, now + patience, last)
        self._begin_later.append((self._launched, begun))
        self._begin_loads()
        return True

    @property
    def _near_room(self) -> int:
        """Blocks that may still come near without pages: half of main memory, or as many as there
        are pages where the system's cache is all there is."""
        near = self._levels.near
        most = self._manager.pool.num_pages if near is None else near // 2
        return most - self._waiting.staged

    def _stage(self, wait: Wait, blocks: Sequence[BlockName]) -> None:
        """Blocks of a request for which there are no pages come as near as they can."""
        if wait.near:
            return
        more = list(blocks[wait.staged :][: max(0, self._near_room)])
        wait.near = wait.staged + len(more) >= len(blocks)
        if more:
            stage = Stage(more)
            self._waiting.add_stage(wait, stage)
            self._worker.stage(stage)

    def _is_asking(self, table: PageTable, wait: Wait, found: Found, now: float) -> bool:
        """Whether the store is still being asked for what no other level has."""
        if not self._levels.is_asked:
            return False
        if not wait.asked:
            if any(now >= give_up for _, give_up in self._asks.values()):
                return False  # it does not answer
            ask = Ask([file_of(kind, key) for kind, key in found.missing])
            wait.asked, self._asks[table] = True, (ask, now + _ASK_SECONDS)
            self._worker.ask(ask)
        if (open_ask := self._asks.get(table)) is None:
            return False
        return not open_ask[0].ended and now < open_ask[1]

    def _begin_loads(self) -> None:
        while self._begin_later and self._begin_later[0][0] <= self._ended:
            self._worker.load(self._begin_later.popleft()[1])

    def _found(self, table: PageTable, tokens: Sequence[int], reusable: int | None) -> Found:
        """What is there of a prompt."""
        hits = self._manager.match(table, tokens, reusable)
        last, keys = self._manager.shareable(tokens, reusable), table.keys
        depth = len(hits)
        while depth < last and file_of(Kind.PAGE, keys[depth]) in self._levels:
            depth += 1
        least, state = len(hits), False
        missing = [(Kind.PAGE, key) for key in keys[depth:last]]
        if (snapshots := self._manager.snapshots) is not None:
            least = len(snapshots.deepest(hits))
            missing += [(Kind.STATE, key) for key in keys[least:last]] if missing else []
            while depth > least and file_of(Kind.STATE, keys[depth - 1]) not in self._levels:
                depth -= 1
            state = depth > least
            hits = hits[:depth]
        return Found(hits, depth, depth - least, state, missing)

    def _blocks(self, table: PageTable, first: int, last: int, state: bool) -> list[BlockName]:
        """Of pages of a request, and perhaps of the state behind the last."""
        chain = [ROOT, *(key for key, _ in table.keys)]
        kinds = [(Kind.PAGE, at) for at in range(first, last)]
        if state:
            kinds.append((Kind.STATE, last - 1))
        return [
            BlockName(kind, self._fingerprint, key, chain[at], data)
            for kind, at in kinds
            for key, data in [table.keys[at]]
        ]

    def _load(
        self,
        table: PageTable,
        hits: list[PrefixNode],
        keys: list[PageKey],
        state: bool,
        reserve: int,
    ) -> Load | None:
        """Pages for blocks that are to be read; None: there are too few."""
        first, count = len(hits), len(keys)
        pages = self._manager.reserve(hits, count, reserve)
        if pages is None:
            return None
        blocks = self._blocks(table, first, first + count, state)
        named = list(zip(blocks, pages, strict=False))
        if not state:
            return Load(named)
        snapshots = self._manager.snapshots
        assert snapshots is not None
        slot = snapshots.states.take_apart()
        if slot == NO_SLOT:
            self._manager.adopt(hits, keys, pages, 0)
            return None
        return Load(named, (blocks[-1], slot))

    def _adopt(self, done: Loading) -> None:
        load = done.load
        pages = [page for _, page in load.pages]
        deepest = self._manager.adopt(done.behind, done.keys, pages, load.loaded)
        whole = load.state is None or load.has_state
        depth = len(done.behind) + load.loaded if whole and deepest is not None else 0
        self._waiting.has_loaded(load, depth)
        if load.state is None:
            return
        block, slot = load.state
        snapshots = self._manager.snapshots
        assert snapshots is not None
        if load.has_state and deepest is not None and deepest.key == block.key:
            snapshots.states.keep(deepest, slot)
        else:
            snapshots.states.free(slot)


def file_of(kind: Kind, key: PageKey) -> str:
    """Of the block of a page."""
    return key[0].hex() + SUFFIXES[kind]
