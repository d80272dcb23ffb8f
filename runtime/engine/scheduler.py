"""Continuous batching: which tokens of which requests make up the next step.

Every step computes one token of each decoding request and fills the rest of the token budget with
pieces of prompts (chunked prefill, Sarathi-Serve, OSDI 2024), by priority and first come, first
served. A request gets the pages of its whole prompt when it is admitted; a decoding one gets a page
when its last is full. If there is none, the request that is served last is preempted: it gives its
pages back and is computed again later, from its prompt and what it has generated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ..kv_cache import BlockManager
from .batch import Ints, Runner, StepBatch
from .batch_writer import BatchWriter, Piece
from .outputs import EngineStats
from .request import Request, State

ORDER = attrgetter("order")


class Scheduler:
    """Owns the requests that are not finished, and the pages of their sequences.

    Attributes:
        waiting: not admitted or preempted, by order.
        prefilling: have pages, some prompt tokens are not computed; by order.
        decoding: all but the last token is computed; as they came.
        sampled: the requests of this step that get a token, in the order of the batch.
        scored: of each row behind these, the request whose prompt token's logprob it gives.
    """

    def __init__(self, runner: Runner, stats: EngineStats) -> None:
        self.page_size = runner.page_size
        # Every decoding request must fit in a step.
        self.capacity = min(runner.max_sequences, runner.max_tokens)
        self.budget, self.max_rows = runner.max_tokens, runner.max_rows
        self.stats = stats
        max_pages = -(-runner.max_context // self.page_size)
        self.manager = BlockManager(runner.num_pages, self.page_size, self.capacity, max_pages)
        self.writer = BatchWriter(runner, self.manager)
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.sampled: list[Request] = []
        self.scored: list[Request] = []
        self._pieces: list[Piece] = []
        self._changed = True  # since the last step, so that the batch must be made anew
        self._until_page = 0  # steps until some decoding request fills its last page

    @property
    def busy(self) -> bool:
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=ORDER)
        self._changed = True

    def remove(self, request: Request) -> None:
        """Take a request out and its pages back; full ones stay in the prefix tree."""
        if request.state is not State.RUNNING:
            del self.waiting[bisect_left(self.waiting, request.order, key=ORDER)]
        elif request in self.decoding:
            self.decoding.remove(request)
        else:
            self.prefilling.remove(request)
        self.manager.release(request.table)
        self._changed = True

    def changed(self) -> None:
        """What a runner needs to know of some sequence has changed."""
        self._changed = True

    def requests(self) -> list[Request]:
        return self.decoding + self.prefilling + self.waiting

    def schedule(self, now: float) -> StepBatch | None:
        """The next step, or None if there is nothing to do."""
        if not self._changed:
            self._until_page -= 1
            new_pages = self._until_page == 0
            if not new_pages or self._grow():
                return self.writer.advance(self.decoding, new_pages)
        else:
            self._grow()
        budget = self.budget - len(self.decoding)
        self._pieces = self._prefill(budget, now)
        if not self.decoding and not self._pieces:
            assert not self.busy, "the first request in line fits into an empty cache"
            return None
        self.sampled = self.decoding + [
            request for request, size in self._pieces if _completes(request, size)
        ]
        self.scored = [request for request, size in self._pieces for _ in request.scored(size)]
        # With a prompt under way the next step is another one.
        self._changed = bool(self._pieces)
        return self.writer.write(self.decoding, self._pieces)

    def computed(self, drawn: Ints) -> None:
        """The step is done: its tokens are in the cache.

        Args:
            drawn: [>= R] the sampled tokens; the caller appends them to the requests.
        """
        self.writer.take(drawn)
        commit, page_size = self.manager.commit, self.page_size
        for request in self.decoding:
            done = request.computed = request.computed + 1
            if done % page_size == 0:
                commit(request.table, request.tokens, done)
        for request, size in self._pieces:
            request.computed += size
            commit(request.table, request.tokens, request.computed)
            if request.computed == len(request.tokens):
                self.prefilling.remove(request)
                self.decoding.append(request)

    def in_step(self) -> list[Request]:
        """All requests of the step that ``schedule`` made last."""
        partial = [r for r, size in self._pieces if not _completes(r, size)]
        return self.sampled + partial

    def _grow(self) -> bool:
        """Give each decoding request a place for its token; False if that preempted one."""
        page_size, whole = self.page_size, True
        self._until_page = page_size
        for request in self.decoding.copy():
            while request.state is State.RUNNING:
                if room := len(request.table.pages) * page_size - request.computed:
                    self._until_page = min(self._until_page, room)
                    break
                if not self.manager.extend(request.table):
                    self._preempt(max(self.decoding + self.prefilling, key=ORDER))
                    whole = False
        return whole

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        request.state, request.computed = State.PREEMPTED, 0
        request.preemptions += 1
        self.stats.preemptions += 1
        self.add(request)

    def _prefill(self, budget: int, now: float) -> list[Piece]:
        """Pieces of prompts: those under way, and new ones that fit, all by order."""
        pieces: list[Piece] = []
        rows = self.max_rows - len(self.decoding)
        may_admit = True
        while budget > 0:
            i = len(pieces)
            request = self.prefilling[i] if i < len(self.prefilling) else None
            head = self.waiting[0] if self.waiting and may_admit else None
            if head is not None and (request is None or head.order < request.order):
                # If it cannot, those behind it wait as well: nobody is overtaken for ever.
                may_admit = self._admit(head, now)
                if may_admit:
                    insort(self.prefilling, head, key=ORDER)
                continue
            if request is None:
                break
            # Every token from the first row on takes a row.
            first = max(request.computed, request.first_row)
            last = min(request.computed + budget, len(request.tokens), first + rows)
            if last == request.computed:
                break
            size = last - request.computed
            pieces.append((request, size))
            budget -= size
            rows -= max(0, last - first)
            if last < len(request.tokens):
                break  # only the last piece may end before its prompt does
        return pieces

    def _admit(self, request: Request, now: float) -> bool:
        running = len(self.decoding) + len(self.prefilling)
        # A page for each that runs: otherwise the next full page would preempt this one again.
        if running >= self.capacity:
            return False
        under_way = [other.table for other in self.prefilling]
        if self.manager.is_coming(request.table, request.tokens, under_way, request.first_row):
            return False
        if not self.manager.admit(request.table, request.tokens, running, request.first_row):
            return False
        self.waiting.remove(request)
        request.computed = request.table.cached * self.page_size
        if request.state is State.WAITING:
            request.admitted_at = now
            request.cached = request.computed
            self.stats.prompt_tokens += request.prompt_size
            self.stats.cached_tokens += request.cached
        request.state = State.RUNNING
        return True


def _completes(request: Request, size: int) -> bool:
    return request.computed + size == len(request.tokens)
