"""The requests that are not finished, by how far they are, and the pages of their sequences.

A request gets the pages of its whole prompt when it is admitted; a decoding one gets a page when
its last is full. If there is none, the request that is served last is preempted: it gives its pages
back and is computed again later, from its prompt and what it has generated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from ...kv_cache import BlockManager, PageTable
from ...kv_tiers.tiers import KvTiers
from ..requests.outputs import EngineStats
from ..requests.request import Request, State

ORDER = attrgetter("order")


class Queues:
    """Owns the unfinished requests.

    Args:
        capacity: requests that may run at once.

    Attributes:
        waiting: not admitted or preempted, by order.
        prefilling: have pages, and prompt tokens that are not computed yet; by order.
        decoding: every token but the last is computed; in order of arrival.
        streamed: whose prompts are computed in parallel with other steps just now. They are in no
            other step, and are not preempted.
        tiers: levels behind the pages; None: there are none.
        changed: since the last step was scheduled, so that its batch must be written again.
        until_page: steps until a decoding request fills a page.
    """

    def __init__(self, manager: BlockManager, stats: EngineStats, capacity: int) -> None:
        self.manager, self.stats, self.capacity = manager, stats, capacity
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.streamed: frozenset[Request] = frozenset()
        self.tiers: KvTiers | None = None
        self.changed, self.until_page = True, 0
        self._short = False  # the first that waits lacks pages
        self._held: list[PageTable] = []  # of ``streamed`` that have ended: still written to

    @property
    def running(self) -> int:
        """Requests that have pages."""
        return len(self.decoding) + len(self.prefilling)

    def add(self, request: Request) -> None:
        """One that waits."""
        insort(self.waiting, request, key=ORDER)
        self._is_read(request, early=self.waiting[0] is not request)
        self.changed = True

    def remove(self, request: Request) -> None:
        """Remove a request and free its pages; full pages stay in the prefix tree."""
        if request.state is not State.RUNNING:
            del self.waiting[bisect_left(self.waiting, request.order, key=ORDER)]
            if self.tiers is not None:
                self.tiers.leaves(request.table)
        elif request in self.decoding:
            self.decoding.remove(request)
        else:
            self.prefilling.remove(request)
        if request in self.streamed:
            self._held.append(request.table)
        else:
            self.manager.release(request.table)
        self.changed = True

    def end_streamed(self) -> None:
        """Nothing is computed in parallel any more: pages of those that have ended meanwhile are
        given back."""
        held, self._held, self.streamed = self._held, [], frozenset()
        for table in held:
            self.manager.release(table)
        self.changed = True

    def grow(self, decoding: Sequence[Request], ahead: bool) -> bool:
        """Give each decoding request a slot for its token; False if there are too few pages.

        Then a request was preempted; nothing was if ``ahead``, since one may be about to end.
        """
        page_size, whole = self.manager.page_size, True
        self.until_page = page_size
        for request in decoding:
            while request.state is State.RUNNING:
                if request.computed < len(request.table.pages) * page_size:
                    left = page_size - request.computed % page_size
                    self.until_page = min(self.until_page, left)
                    break
                if not self.manager.extend(request.table):
                    self.changed = True
                    if ahead:
                        return False
                    others = [r for r in self.prefilling if r not in self.streamed]
                    self.preempt(max(self.decoding + others, key=ORDER))
                    whole = False
        return whole

    def preempt(self, request: Request) -> None:
        """It gives back its pages, and waits."""
        self.remove(request)
        request.state, request.computed = State.PREEMPTED, 0
        request.preemptions += 1
        self.stats.preemptions += 1
        self.add(request)

    def admit(
        self,
        budget: int,
        most: int,
        now: float,
        beside: Sequence[Request],
        impatient: int = 0,
    ) -> None:
        """Admits requests, by order, until those that are admitted fill the next step; what the
        next ones need is read meanwhile.

        A request that waits for pages holds up all behind it: nobody is overtaken for ever.

        Args:
            budget: tokens of that step; ``most``: of a prompt that is short.
            beside: the prompts that may be in it.
            impatient: a request of fewer tokens does not wait for what is computed in parallel with
                other steps, which it might share.
        """
        self._short = False
        self._admit_waiting(budget, most, now, beside, impatient)
        if self.tiers is not None:
            for request in self.waiting[: self.capacity]:
                self._is_read(request, early=True)

    def _admit_waiting(
        self, budget: int, most: int, now: float, beside: Sequence[Request], impatient: int
    ) -> None:
        for request in self.waiting.copy():
            if self.running >= self.capacity:
                return
            before = [r for r in beside if r.order < request.order]
            wanted = sum(r.left for r in before)
            if wanted >= budget:
                short = sum(r.left for r in before if r.left <= most)
                if request.left > most or short >= budget // 2:
                    continue
            apart = self.streamed if request.left < impatient else ()
            under_way = [other.table for other in self.prefilling if other not in apart]
            if self.manager.is_coming(request.table, request.tokens, under_way, request.first_row):
                continue
            if self._is_read(request):
                continue
            if not self._admit(request, now):
                self._short = True
                return
            insort(self.prefilling, request, key=ORDER)

    def _is_read(self, request: Request, early: bool = False) -> bool:
        """Whether pages that a request waits for are being read from another level.

        Args:
            early: it is not its turn: pages for which an earlier one waits are not for it.
        """
        if self.tiers is None:
            return False
        reserve = self.manager.pool.num_pages if early and self._short else self.running
        return self.tiers.is_coming(
            request.table, request.tokens, request.first_row, reserve, early
        )

    def _admit(self, request: Request, now: float) -> bool:
        # One spare page per running request, else the next full page would preempt this one again.
        manager = self.manager
        if not manager.admit(request.table, request.tokens, self.running, request.first_row):
            return False
        self.waiting.remove(request)
        if self.tiers is not None:
            self.tiers.leaves(request.table)
        request.computed = request.table.cached * manager.page_size
        if request.state is State.WAITING:
            request.admitted_at = now
            request.cached = request.computed
            self.stats.prompt_tokens += request.prompt_size
            self.stats.cached_tokens += request.cached
        request.state = State.RUNNING
        return True
