"""Continuous batching: which tokens of which requests make up the next step.

Every step computes one token of each decoding request and fills the rest of the token budget with
prefill chunks (chunked prefill, Sarathi-Serve, OSDI 2024), by priority and arrival; what these
leave is for drafts of the tokens that follow (``Drafts``). While other requests decode,
``PrefillCap`` bounds the prompt tokens, so that their inter-token time stays near its target. A
prompt that is longer than a step leaves half of the budget to shorter ones behind it.

A step may be scheduled ahead, while the one before runs: as if no request ended but those that
reach their most tokens. Pages and rows that are given back meanwhile may be dealt out at once,
since steps run one behind the other.

Where a runner has a ``prefill_runner``, chunks of so many tokens as are worth it are a step of
their own, which runs in parallel with those of the decoding requests (``PrefillStream``).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from ...kv_cache import BlockManager
from ...runner.batch import Runner
from ..requests.outputs import EngineStats
from ..requests.request import Request, State
from .batch_writer import BatchWriter
from .chunks import Chunks
from .config import EngineConfig
from .drafts import Drafts
from .prefill_cap import STALL_SECONDS, PrefillCap
from .prefill_stream import PrefillStream
from .queues import ORDER, Queues
from .step import PrefillChunk, ScheduledStep
from .streamed_times import StreamedTimes


class Scheduler(Queues):
    """Deals requests to steps.

    Attributes:
        prefill_stream: computes prompts in parallel with other steps; None: the runner cannot.
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
        capacity = min(runner.max_num_seqs, runner.max_num_batched_tokens)
        manager = BlockManager(
            runner.num_pages,
            self.page_size,
            capacity,
            -(-runner.max_model_len // self.page_size),
            runner.state_slots,
            -(-config.snapshot_spacing // self.page_size),
            runner.window_pages,
            runner.window,
        )
        super().__init__(manager, stats, capacity)
        self.budget, self.max_num_logits = runner.max_num_batched_tokens, runner.max_num_logits
        target = config.target_itl_ms
        self.cap = PrefillCap(None if target is None else target / 1e3, self.budget)
        self.chunks = Chunks(manager, config.max_partial_prefills)
        self.writer = BatchWriter(runner, manager)
        self.prefill_stream: PrefillStream | None = None
        self._config, self._drafts = config, drafts
        self._last: ScheduledStep
        self._streams_from, self._times = 0, StreamedTimes(0.0)
        self._decoded_at = -math.inf  # when a request last decoded beside another one

    def add_prefill_stream(self, runner: Runner) -> PrefillStream | None:
        """Called once the runner is bound."""
        snapshots = self.manager.snapshots
        if snapshots is not None:
            snapshots.in_steps = runner.saves_states
        if runner.streams_from and snapshots is not None and self._config.snapshot_tokens is None:
            snapshots.stretch = self.budget // self.page_size
        if self._config.prefill_yield:
            self._streams_from = runner.streams_from
        if self._streams_from:
            self._times = StreamedTimes(runner.least_seconds)
        if runner.prefill_runner is not None:
            assert self.manager.snapshots is None, "no states are copied beside a running step"
            policy, share = self._config.routing_policy, self._config.prefill_yield
            if share and self.cap.target is None:
                self.cap = PrefillCap(STALL_SECONDS, self.budget)
            self.prefill_stream = PrefillStream(
                runner.prefill_runner, self, self.chunks, policy, share
            )
        return self.prefill_stream

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
            self.changed = True

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
            self.changed |= bool(proposed)
        if not self.changed:
            self.until_page -= 1
            new_pages = self.until_page == 0
            if not new_pages or self.grow(self._last.decoding, ahead):
                self.writer.advance(self._last.decoding, new_pages)
                return self._advance(self._last)
        # A request is left out that draws its last token just now.
        decoding = [r for r in self.decoding if r.drawn < r.max_tokens]
        if self.waiting and len(decoding) < len(self.decoding):
            return None
        if not self.grow(decoding, ahead):
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
            idle = not (ahead or self.streamed or self.loading)
            assert not (idle and self.busy), "the first request in line fits into an empty cache"
            return None
        rows = {request: row for row, request in enumerate(before.sampled)} if before else None
        if rows is not None and any(request not in rows for request in decoding):
            self.changed = True  # one has come from the step beside: its token is known
            return None
        drafts: list[list[int]] = []
        if self._drafts is not None and proposed:  # they have what prompts leave
            tokens = min(most, self._drafts.step_tokens)
            tokens -= len(decoding) + sum(chunk.size for chunk in chunks)
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
        self.changed = bool(chunks or drafts)
        return self._advance(self._last)

    def may_draft(self, step: ScheduledStep) -> bool:
        """Whether the next step may have drafts, which follow from what this one draws."""
        if self._drafts is None:
            return False
        may, count = self._drafts.may_have, len(step.sampled)
        return any(may(request, request.most_drafts, count) for request in step.sampled)

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
                self.changed = True  # how it is drawn, or who decodes
        return step

    def schedule_prefill(self, now: float) -> ScheduledStep | None:
        """The next step of the prefill stream, if there is one: see there."""
        if self.prefill_stream is None:
            return None
        return self.prefill_stream.schedule(now, self._decoded_at)

    def undo_prefill(self, step: ScheduledStep) -> None:
        """The prefill stream's step is not launched: it is scheduled anew."""
        assert self.prefill_stream is not None
        self.prefill_stream.undo(step)

    def undo(self, step: ScheduledStep) -> None:
        """The step that was scheduled last is not launched: another takes its place."""
        for request, count in zip(step.decoding, step.num_scheduled, strict=True):
            request.computed -= count
            request.drawn -= count
        for chunk in step.chunks:
            chunk.request.computed = chunk.first
            if self.manager.snapshots is not None:
                self.manager.snapshots.undo(chunk.request.table)
            if chunk.completes:
                self.decoding.remove(chunk.request)
                insort(self.prefilling, chunk.request, key=ORDER)
                chunk.request.drawn -= 1
        self.changed = True

    def launched(self, step: ScheduledStep) -> None:
        """Later steps may share the pages of the step's prompts: they run behind it."""
        for request, first, size in step.chunks:
            step.inserted += self.manager.commit(
                request.table, request.tokens, first + size, step.completed
            )
        if self.tiers is not None:
            self.tiers.launched(step.inserted)
        if (snapshots := self.manager.snapshots) is not None:
            for chunk in step.chunks:
                step.snapshots += snapshots.reached(
                    chunk.request.table, chunk.last, chunk.completes
                )
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
        for chunk in step.chunks:
            self.computed(chunk.request, chunk.last)
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
                self.computed(request, size + accepted[i])
            rejected = step.num_scheduled[i] - 1 - accepted[i]
            request.computed -= rejected
            request.drawn -= rejected

    def failed(self, step: ScheduledStep) -> None:
        """The pages that it should have filled hold nothing; its requests have ended."""
        lost = self.manager.forget(step.inserted)
        lost |= self.manager.forget_windows(step.completed)
        self.manager.forget_snapshots(step.snapshots)
        for request in self.decoding + self.prefilling:
            table = request.table
            if not lost.isdisjoint(table.pages) or table.source in step.snapshots:
                self.preempt(request)
        if self.tiers is not None:
            self.tiers.filled(step.inserted)

    def timed(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long."""
        if self.tiers is not None:
            self.tiers.computed(sum(chunk.size for chunk in step.chunks), seconds)
        if step.chunks and step.T >= self._streams_from:
            self._times.record(step.T, seconds)
        self.cap.record(sum(step.num_scheduled), sum(chunk.size for chunk in step.chunks), seconds)

    def _prefill(self, budget: int, decoding: int, now: float) -> list[PrefillChunk]:
        """Prefill chunks, at most ``budget`` tokens: those that end their prompt come first."""
        if budget <= 0:
            return []
        beside, rows = self.prefill_stream, self.max_num_logits - decoding
        if beside is None:
            if self._streams_from and self.running + len(self.waiting) > 1:
                budget = min(budget, max(self._streams_from, self._times.most_tokens()))
            self.admit(budget, self.budget, now, self.prefilling)
            return self.chunks.of(self.prefilling, budget, rows, self.budget)
        self.admit(budget, self.budget, now, beside.others(), beside.impatient)
        return self.chunks.of(beside.others(), budget, rows, self.budget)
