"""Continuous batching: which tokens of which requests make up the next step.

Every step computes one token of each decoding request and fills the rest of the token budget with
prefill chunks (chunked prefill, Sarathi-Serve, OSDI 2024), by priority and arrival. While other
requests decode, ``PrefillCap`` bounds the prompt tokens, so that their inter-token time stays near
its target. A prompt that is longer than a step leaves half of the budget to shorter ones behind it.

A request gets the pages of its whole prompt when it is admitted; a decoding one gets a page when
its last is full. If there is none, the request that is served last is preempted: it gives its pages
back and is computed again later, from its prompt and what it has generated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ...kv_cache import BlockManager
from ..batch import Ints, Runner, StepBatch
from ..config import EngineConfig
from ..outputs import EngineStats
from ..request import Request, State
from .batch_writer import BatchWriter, PrefillChunk
from .prefill_cap import PrefillCap

ORDER = attrgetter("order")


class Scheduler:
    """Owns the unfinished requests and the pages of their sequences.

    Attributes:
        waiting: not admitted or preempted, by order.
        prefilling: have pages, and prompt tokens that are not computed yet; by order.
        decoding: every token but the last is computed; in order of arrival.
        sampled: the requests that this step samples a token for, in the batch's order.
        logprob_requests: for each further row of logits, the request whose prompt logprob it gives.
    """

    def __init__(self, runner: Runner, stats: EngineStats, config: EngineConfig) -> None:
        self.page_size = runner.page_size
        # Every decoding request must fit in a step.
        self.capacity = min(runner.max_num_seqs, runner.max_num_batched_tokens)
        self.budget, self.max_num_logits = runner.max_num_batched_tokens, runner.max_num_logits
        target = config.target_itl_ms
        self.cap = PrefillCap(None if target is None else target / 1e3, self.budget)
        self.max_partial = config.max_partial_prefills
        self.stats = stats
        max_pages = -(-runner.max_model_len // self.page_size)
        self.manager = BlockManager(runner.num_pages, self.page_size, self.capacity, max_pages)
        self.writer = BatchWriter(runner, self.manager)
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.sampled: list[Request] = []
        self.logprob_requests: list[Request] = []
        self._chunks: list[PrefillChunk] = []
        self._changed = True  # since the last step: the batch must be written again
        self._decoded = 0  # requests that decode in the step
        self._until_page = 0  # steps until a decoding request fills its last page

    @property
    def busy(self) -> bool:
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=ORDER)
        self._changed = True

    def remove(self, request: Request) -> None:
        """Remove a request and free its pages; full pages stay in the prefix tree."""
        if request.state is not State.RUNNING:
            del self.waiting[bisect_left(self.waiting, request.order, key=ORDER)]
        elif request in self.decoding:
            self.decoding.remove(request)
        else:
            self.prefilling.remove(request)
        self.manager.release(request.table)
        self._changed = True

    def changed(self) -> None:
        """Called when a sequence's sampling has changed: the next batch is written again."""
        self._changed = True

    def requests(self) -> list[Request]:
        return self.decoding + self.prefilling + self.waiting

    def schedule(self, now: float) -> StepBatch | None:
        """The next step, or None if there is nothing to do."""
        self._decoded = len(self.decoding)
        if not self._changed:
            self._until_page -= 1
            new_pages = self._until_page == 0
            if not new_pages or self._grow():
                return self.writer.advance(self.decoding, new_pages)
        else:
            self._grow()
        self._decoded = len(self.decoding)
        budget = self.budget - len(self.decoding)
        self._chunks = self._prefill(min(budget, self.cap.limit(len(self.decoding))), now)
        if not self.decoding and not self._chunks:
            assert not self.busy, "the first request in line fits into an empty cache"
            return None
        self.sampled = self.decoding + [
            request for request, size in self._chunks if _completes(request, size)
        ]
        self.logprob_requests = [
            request
            for request, size in self._chunks
            for _ in request.prompt_logprob_positions(size)
        ]
        # While a prompt is being prefilled, every step is a different one.
        self._changed = bool(self._chunks)
        return self.writer.write(self.decoding, self._chunks)

    def computed(self, sampled_token_ids: Ints) -> None:
        """Called after the step: its tokens are in the cache now.

        Args:
            sampled_token_ids: [>= R]; the caller appends them to the requests.
        """
        self.writer.set_tokens(sampled_token_ids)
        commit, page_size = self.manager.commit, self.page_size
        for request in self.decoding:
            done = request.computed = request.computed + 1
            if done % page_size == 0:
                commit(request.table, request.tokens, done)
        for request, size in self._chunks:
            request.computed += size
            commit(request.table, request.tokens, request.computed)
            if request.computed == len(request.tokens):
                self.prefilling.remove(request)
                self.decoding.append(request)

    def in_batch(self) -> list[Request]:
        """The sequences of the step that was scheduled last, in its order; before ``computed``."""
        return self.decoding + [request for request, _ in self._chunks]

    def in_step(self) -> list[Request]:
        """All requests of the last scheduled step."""
        partial = [r for r, size in self._chunks if not _completes(r, size)]
        return self.sampled + partial

    def _grow(self) -> bool:
        """Give each decoding request a slot for its token; False if that preempted a request."""
        page_size, whole = self.page_size, True
        self._until_page = page_size
        for request in self.decoding.copy():
            while request.state is State.RUNNING:
                if free_places := len(request.table.pages) * page_size - request.computed:
                    self._until_page = min(self._until_page, free_places)
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

    def timed(self, seconds: float) -> None:
        """The step that ``schedule`` made last took so long."""
        prompt_tokens = sum(size for _, size in self._chunks)
        self.cap.record(self._decoded, prompt_tokens, seconds)

    def _prefill(self, budget: int, now: float) -> list[PrefillChunk]:
        """Prefill chunks, at most ``budget`` tokens: those that end their prompt come first."""
        if budget <= 0:
            return []
        self._admit_waiting(budget, now)
        rows = self.max_num_logits - len(self.decoding)
        # (request, its next token), by order. A long prompt that leads must leave half to short
        # ones; what these do not need goes to all by order.
        ends: dict[Request, int] = {}
        short = [r for r in self.prefilling if self._is_short(r)]
        mixed = bool(short) and not self._is_short(self.prefilling[0])
        turns = [(short, budget // 2)] if mixed else []
        for requests, most in [*turns, (self.prefilling, budget)]:
            left = min(most, budget)
            for request in requests:
                start = ends.get(request, request.computed)
                # Every token from the first row on needs a row of logits.
                first_row = max(start, request.first_row)
                end = min(start + left, len(request.tokens), first_row + rows)
                if end <= start:
                    continue
                ends[request] = end
                left -= end - start
                budget -= end - start
                rows -= max(0, end - first_row)
                partial = sum(e < len(r.tokens) for r, e in ends.items())
                if partial >= self.max_partial:
                    break
        chunks = [(request, end - request.computed) for request, end in ends.items()]
        return sorted(chunks, key=lambda chunk: (not _completes(*chunk), chunk[0].order))

    def _is_short(self, request: Request) -> bool:
        """Whether the rest of its prompt fits into one step."""
        return len(request.tokens) - request.computed <= self.budget

    def _admit_waiting(self, budget: int, now: float) -> None:
        """Admits requests, by order, until those that are admitted fill the next step.

        A request that waits for pages holds up all behind it: nobody is overtaken for ever.
        """
        for request in self.waiting.copy():
            if len(self.decoding) + len(self.prefilling) >= self.capacity:
                return
            before = [r for r in self.prefilling if r.order < request.order]
            wanted = sum(len(r.tokens) - r.computed for r in before)
            if wanted >= budget:
                short = sum(len(r.tokens) - r.computed for r in before if self._is_short(r))
                if not self._is_short(request) or short >= budget // 2:
                    continue
            under_way = [other.table for other in self.prefilling]
            if self.manager.is_coming(request.table, request.tokens, under_way, request.first_row):
                continue
            if not self._admit(request, now):
                return
            insort(self.prefilling, request, key=ORDER)

    def _admit(self, request: Request, now: float) -> bool:
        running = len(self.decoding) + len(self.prefilling)
        # One spare page per running request, else the next full page would preempt this one again.
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
