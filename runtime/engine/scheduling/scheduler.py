"""Continuous batching: which tokens of which requests make up the next step.

Every step computes one token of each decoding request and fills the rest of the token budget with
prefill chunks (chunked prefill, Sarathi-Serve, OSDI 2024), by priority and arrival; what these
leave is for drafts of the tokens that follow (``Drafts``). While other requests decode,
``PrefillCap`` bounds the prompt tokens, so that their inter-token time stays near its target. A
prompt that is longer than a step leaves half of the budget to shorter ones behind it.

A request gets the pages of its whole prompt when it is admitted; a decoding one gets a page when
its last is full. If there is none, the request that is served last is preempted: it gives its pages
back and is computed again later, from its prompt and what it has generated.

A step may be scheduled ahead, while the one before runs: as if no request ended but those that
reach their most tokens. Pages and rows that are given back meanwhile may be dealt out at once,
since steps run one behind the other.

Where a runner has a ``prefill_runner``, chunks of so many tokens as are worth it are a step of
their own, which runs in parallel with those of the decoding requests (``PrefillStream``).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from ...kv_cache import BlockManager
from ...kv_tiers.tiers import KvTiers
from ...runner.batch import Route, Runner
from ..requests.outputs import EngineStats
from ..requests.request import Request, State
from .batch_writer import BatchWriter
from .config import EngineConfig
from .drafts import Drafts
from .prefill_cap import PrefillCap
from .prefill_stream import PrefillStream
from .step import PrefillChunk, ScheduledStep

ORDER = attrgetter("order")


class Scheduler:
    """Owns the unfinished requests and the pages of their sequences.

    Attributes:
        waiting: not admitted or preempted, by order.
        prefilling: have pages, and prompt tokens that are not computed yet; by order.
        decoding: every token but the last is computed; in order of arrival.
        prefill_stream: computes prompts in parallel with other steps; None: the runner cannot.
        tiers: levels behind the pages; None: there are none.
    """

    def __init__(
        self,
        runner: Runner,
        stats: EngineStats,
        config: EngineConfig,
        drafts: Drafts | None = None,
    ) -> None:
        self.page_size = runner.page_size
        # Every decoding request must fit in a step.
        self.capacity = min(runner.max_num_seqs, runner.max_num_batched_tokens)
        self.budget, self.max_num_logits = runner.max_num_batched_tokens, runner.max_num_logits
        target = config.target_itl_ms
        self.cap = PrefillCap(None if target is None else target / 1e3, self.budget)
        self.policy = config.routing_policy
        self.max_partial = config.max_partial_prefills
        self.stats = stats
        max_pages = -(-runner.max_model_len // self.page_size)
        self.manager = BlockManager(
            runner.num_pages,
            self.page_size,
            self.capacity,
            max_pages,
            runner.state_slots,
            -(-config.snapshot_spacing // self.page_size),
        )
        self.writer = BatchWriter(runner, self.manager)
        self.prefill_stream: PrefillStream | None = None
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.tiers: KvTiers | None = None
        self._drafts = drafts
        self._last: ScheduledStep
        self._changed = True  # since the last step: the batch must be written again
        self._decoded_at = -math.inf  # when a request last decoded beside another one
        self._until_page = 0  # steps until a decoding request fills a page

    def add_prefill_stream(self, runner: Runner) -> None:
        """Called once the runner is bound."""
        if runner.prefill_runner is not None:
            assert self.manager.snapshots is None, "no states are copied beside a running step"
            self.prefill_stream = PrefillStream(runner.prefill_runner, self.manager, self.policy)

    @property
    def busy(self) -> bool:
        return bool(self.decoding or self.prefilling or self.waiting)

    @property
    def loading(self) -> bool:
        """Whether pages are being read from another level."""
        return self.tiers is not None and self.tiers.loading

    def collect(self) -> None:
        """Requests may be waiting for what was read from other levels."""
        if self.tiers is not None and self.tiers.collect():
            self._changed = True

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=ORDER)
        self._is_read(request)
        self._changed = True

    def remove(self, request: Request) -> None:
        """Remove a request and free its pages; full pages stay in the prefix tree."""
        if request.state is not State.RUNNING:
            del self.waiting[bisect_left(self.waiting, request.order, key=ORDER)]
        elif request in self.decoding:
            self.decoding.remove(request)
        else:
            self.prefilling.remove(request)
        if request in self._in_prefill_stream:
            assert self.prefill_stream is not None
            self.prefill_stream.hold(request)
        else:
            self.manager.release(request.table)
        self._changed = True

    @property
    def _in_prefill_stream(self) -> frozenset[Request]:
        """Requests whose prompts are computed in parallel with other steps just now."""
        return frozenset() if self.prefill_stream is None else self.prefill_stream.requests

    def requests(self) -> list[Request]:
        return self.decoding + self.prefilling + self.waiting

    def schedule(self, now: float, before: ScheduledStep | None = None) -> ScheduledStep | None:
        """The next step, as if it were launched; None if there is nothing to do.

        Args:
            before: the step that runs, whose tokens are not known yet. Then None may also mean that
                its end is to be awaited: it gives back what others wait for.
        """
        ahead = before is not None
        if self.decoding and (len(self.decoding) > 1 or self.prefilling or self.waiting):
            self._decoded_at = now
        proposed: dict[Request, list[int]] = {}
        if self._drafts is not None and not ahead:
            proposed = self._drafts.propose(self.decoding)
            self._changed |= bool(proposed)
        if not self._changed:
            self._until_page -= 1
            new_pages = self._until_page == 0
            if not new_pages or self._grow(self._last.decoding, ahead):
                self.writer.advance(self._last.decoding, new_pages)
                return self._advance(self._last)
        # A request is left out that draws its last token just now.
        decoding = [r for r in self.decoding if r.drawn < r.max_tokens]
        if self.waiting and len(decoding) < len(self.decoding):
            return None
        if not self._grow(decoding, ahead):
            if ahead:
                return None
            decoding = [r for r in decoding if r.state is State.RUNNING]
        most = (
            self.budget
            if self.prefill_stream is None
            else min(self.budget, self.prefill_stream.max_others)
        )
        budget = most - len(decoding)
        chunks = self._prefill(min(budget, self.cap.limit(len(decoding))), len(decoding), now)
        if not decoding and not chunks:
            idle = not (ahead or self._in_prefill_stream or self.loading)
            assert not (idle and self.busy), "the first request in line fits into an empty cache"
            return None
        rows = {request: row for row, request in enumerate(before.sampled)} if before else None
        if rows is not None and any(request not in rows for request in decoding):
            self._changed = True  # one has come from the step beside: its token is known
            return None
        drafts: list[list[int]] = []
        if self._drafts is not None and proposed:  # they have what prompts leave
            tokens = most - len(decoding) - sum(chunk.size for chunk in chunks)
            logits = self.max_num_logits - len(decoding)
            logits -= sum(chunk.completes + len(chunk.logprob_positions) for chunk in chunks)
            fits = self._drafts.fitting(self.manager, decoding, proposed, min(tokens, logits))
            if fits:
                decoding = sorted(decoding, key=lambda request: request in fits)
                drafts = [fits.get(request, []) for request in decoding]
        batch = self.writer.write(decoding, chunks, rows, drafts)
        self._last = ScheduledStep(
            batch,
            decoding,
            chunks,
            decoding + [chunk.request for chunk in chunks if chunk.completes],
            [chunk.request for chunk in chunks for _ in chunk.logprob_positions],
            any(sampling.params.logprobs is not None for sampling in batch.sampling),
            drafts,
        )
        # While a prompt is being prefilled, or with drafts, every step is a different one.
        self._changed = bool(chunks or drafts)
        return self._advance(self._last)

    def may_draft(self, step: ScheduledStep) -> bool:
        """Whether the next step may have drafts, which follow from what this one draws."""
        return self._drafts is not None and any(r.most_drafts > 0 for r in step.sampled)

    def has_drafts(self, step: ScheduledStep, sampled_token_ids: Sequence[int]) -> bool:
        """Whether there are drafts behind what a step has drawn, and the next one, which is
        scheduled, has none."""
        return self._drafts is not None and self._drafts.any_behind(step, sampled_token_ids)

    def _advance(self, step: ScheduledStep) -> ScheduledStep:
        """Its requests are where the step will have brought them."""
        for request, count in zip(step.decoding, step.num_scheduled, strict=True):
            request.computed += count
            request.drawn += count
        for chunk in step.chunks:
            chunk.request.computed = chunk.last
            if chunk.completes:
                self.prefilling.remove(chunk.request)
                self.decoding.append(chunk.request)
                chunk.request.drawn += 1
        for request in step.sampled:
            if request.drawn in (request.min_tokens, request.max_tokens):
                self._changed = True  # how it is drawn, or who decodes
        return step

    def schedule_prefill(self, now: float) -> ScheduledStep | None:
        """The next step of the prefill stream, as if it were launched; None: it is busy, or too
        little waits.

        It may be launched when the steps have ended that are launched by now.
        """
        prefill_stream = self.prefill_stream
        if prefill_stream is None or prefill_stream.requests:
            return None
        self._admit_waiting(self.budget, now, self.prefilling)
        chunks = self._chunks(self.budget, self.max_num_logits, self.prefilling)
        decoding, tokens = bool(self.decoding), sum(chunk.size for chunk in chunks)
        idle = 0.0 if decoding else now - self._decoded_at
        route = prefill_stream.route(tokens, decoding, idle)
        if route == Route.CHUNKED:
            return None
        step = prefill_stream.schedule(chunks, route)
        for chunk in chunks:
            chunk.request.computed = chunk.last
        for request in step.sampled:
            request.drawn += 1
        return step

    def undo_prefill(self, step: ScheduledStep) -> None:
        """The prefill stream's step is not launched: it is scheduled anew."""
        for request in step.sampled:
            request.drawn -= 1
        for chunk in step.chunks:
            chunk.request.computed = chunk.first
        self._leave_prefill_stream()

    def finished_prefill(self, step: ScheduledStep, whole: bool) -> None:
        """Called before what the prefill stream's step drew is appended: pages that it has filled
        are shared, if it is ``whole`` and has not failed."""
        for request, first, size in step.chunks:
            if request.state is State.RUNNING and whole:
                self.manager.commit(request.table, request.tokens, first + size)
                if request in step.sampled:
                    self.prefilling.remove(request)
                    self.decoding.append(request)
        self._leave_prefill_stream()

    def _leave_prefill_stream(self) -> None:
        assert self.prefill_stream is not None
        for table in self.prefill_stream.leave():
            self.manager.release(table)
        self._changed = True

    def undo(self, step: ScheduledStep) -> None:
        """The step that was scheduled last is not launched: another takes its place."""
        for request, count in zip(step.decoding, step.num_scheduled, strict=True):
            request.computed -= count
            request.drawn -= count
        for chunk in step.chunks:
            chunk.request.computed = chunk.first
            if chunk.completes:
                self.decoding.remove(chunk.request)
                insort(self.prefilling, chunk.request, key=ORDER)
                chunk.request.drawn -= 1
        self._changed = True

    def launched(self, step: ScheduledStep) -> None:
        """Later steps may share the pages of the step's prompts: they run behind it."""
        for request, first, size in step.chunks:
            step.inserted += self.manager.commit(request.table, request.tokens, first + size)
        if self.tiers is not None:
            self.tiers.launched(step.inserted)
        if (snapshots := self.manager.snapshots) is not None:
            for chunk in step.chunks:
                node = snapshots.reached(chunk.request.table, chunk.last, chunk.completes)
                if node is not None:
                    step.snapshots.append(node)
            for request in step.decoding:
                snapshots.decoded(request.table, request.computed)

    def take_state_copies(self) -> list[tuple[int, int]]:
        """(from, to) of the states that are to be copied before the next step."""
        snapshots = self.manager.snapshots
        return [] if snapshots is None else snapshots.states.take_copies()

    @property
    def copies_states(self) -> bool:
        """Whether states are to be copied before the next step."""
        snapshots = self.manager.snapshots
        return snapshots is not None and bool(snapshots.states.copies)

    def ended(self) -> None:
        """The step that was launched first, of those that run, has ended, well or not."""
        if self.tiers is not None:
            self.tiers.ended()

    def finished(self, step: ScheduledStep) -> None:
        """Called before what the step drew is appended: pages that it has filled are shared. Drafts
        that are not accepted were not computed: what comes in their place is written over them."""
        if self.tiers is not None:
            self.tiers.filled(step.inserted)
        accepted = step.num_accepted
        for i, request in enumerate(step.decoding):
            if request.state is not State.RUNNING:
                continue
            size = len(request.tokens)
            if (size + accepted[i]) // self.page_size > (size - 1) // self.page_size:
                drafts = step.drafts[i][: accepted[i]] if accepted[i] else []
                self.manager.commit(request.table, request.tokens + drafts, size + accepted[i])
                if self.manager.snapshots is not None:
                    self.manager.snapshots.finished(request.table, size)
            rejected = step.num_scheduled[i] - 1 - accepted[i]
            request.computed -= rejected
            request.drawn -= rejected

    def failed(self, step: ScheduledStep) -> None:
        """The pages that it should have filled hold nothing; its requests have ended."""
        lost = self.manager.forget(step.inserted)
        self.manager.forget_snapshots(step.snapshots)
        for request in self.decoding + self.prefilling:
            table = request.table
            if not lost.isdisjoint(table.pages) or table.source in step.snapshots:
                self._preempt(request)
        if self.tiers is not None:
            self.tiers.filled(step.inserted)

    def _grow(self, decoding: list[Request], ahead: bool) -> bool:
        """Give each decoding request a slot for its token; False if there are too few pages.

        Then a request was preempted; nothing was if ``ahead``, since one may be about to end.
        """
        page_size, whole = self.page_size, True
        self._until_page = page_size
        for request in decoding:
            while request.state is State.RUNNING:
                if request.computed < len(request.table.pages) * page_size:
                    left = page_size - request.computed % page_size
                    self._until_page = min(self._until_page, left)
                    break
                if not self.manager.extend(request.table):
                    self._changed = True
                    if ahead:
                        return False
                    others = [r for r in self.prefilling if r not in self._in_prefill_stream]
                    self._preempt(max(self.decoding + others, key=ORDER))
                    whole = False
        return whole

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        request.state, request.computed = State.PREEMPTED, 0
        request.preemptions += 1
        self.stats.preemptions += 1
        self.add(request)

    def timed(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long."""
        if self.tiers is not None:
            self.tiers.computed(sum(chunk.size for chunk in step.chunks), seconds)
        self.cap.record(sum(step.num_scheduled), sum(chunk.size for chunk in step.chunks), seconds)

    def _prefill(self, budget: int, decoding: int, now: float) -> list[PrefillChunk]:
        """Prefill chunks, at most ``budget`` tokens: those that end their prompt come first."""
        if budget <= 0:
            return []
        own = self._short_enough()
        self._admit_waiting(budget, now, own)
        return self._chunks(budget, self.max_num_logits - decoding, self._short_enough())

    def _short_enough(self) -> list[Request]:
        """The prompts that are not for the prefill stream."""
        prefill_stream = self.prefill_stream
        if prefill_stream is None or not prefill_stream.requests:  # it has just declined these ones
            return self.prefilling
        least = prefill_stream.least(bool(self.decoding))
        return [
            r
            for r in self.prefilling
            if r not in prefill_stream.requests and len(r.tokens) - r.computed < least
        ]

    def _chunks(self, budget: int, rows: int, prefilling: Sequence[Request]) -> list[PrefillChunk]:
        """Chunks of these prompts, which are in order: at most ``budget`` tokens, and rows of
        logits."""
        # (request, its next token), by order. A long prompt that leads must leave half to short
        # ones; what these do not need goes to all by order.
        ends: dict[Request, int] = {}
        short = [r for r in prefilling if self._is_short(r)]
        mixed = bool(short) and not self._is_short(prefilling[0])
        turns = [(short, budget // 2)] if mixed else []
        for requests, most in [*turns, (prefilling, budget)]:
            left = min(most, budget)
            for request in requests:
                start = ends.get(request, request.computed)
                # Every token from the first row on needs a row of logits.
                first_row = max(start, request.first_row)
                end = min(start + left, len(request.tokens), first_row + rows)
                if (mark := self.manager.chunk_end(request.table)) is not None:
                    end = min(end, mark)
                if end <= start:
                    continue
                ends[request] = end
                left -= end - start
                budget -= end - start
                rows -= max(0, end - first_row)
                partial = sum(e < len(r.tokens) for r, e in ends.items())
                if partial >= self.max_partial:
                    break
        chunks = [PrefillChunk(r, r.computed, end - r.computed) for r, end in ends.items()]
        return sorted(chunks, key=lambda chunk: (not chunk.completes, chunk.request.order))

    def _is_short(self, request: Request) -> bool:
        """Whether the rest of its prompt fits into one step."""
        return len(request.tokens) - request.computed <= self.budget

    def _admit_waiting(self, budget: int, now: float, prefilling: Sequence[Request]) -> None:
        """Admits requests, by order, until those that are admitted fill the next step, beside the
        prompts that may be in it.

        A request that waits for pages holds up all behind it: nobody is overtaken for ever.
        """
        for request in self.waiting.copy():
            if len(self.decoding) + len(self.prefilling) >= self.capacity:
                return
            before = [r for r in prefilling if r.order < request.order]
            wanted = sum(len(r.tokens) - r.computed for r in before)
            if wanted >= budget:
                short = sum(len(r.tokens) - r.computed for r in before if self._is_short(r))
                if not self._is_short(request) or short >= budget // 2:
                    continue
            under_way = [other.table for other in self.prefilling]
            if self.manager.is_coming(request.table, request.tokens, under_way, request.first_row):
                continue
            if self._is_read(request):
                continue
            if not self._admit(request, now):
                return
            insort(self.prefilling, request, key=ORDER)

    def _is_read(self, request: Request) -> bool:
        """Whether pages that a request waits for are being read from another level."""
        if self.tiers is None:
            return False
        running = len(self.decoding) + len(self.prefilling)
        return self.tiers.is_coming(request.table, request.tokens, request.first_row, running)

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
