"""Prompts in steps of their own, which run beside those of the requests that decode (OSDI 3.3.2).

A prompt whose experts cross a link to the GPU leaves the workers of the CPU free, so others decode
meanwhile. Its step is known to the scheduler from when it is scheduled until its tokens are
delivered:

- Its requests are in no other step, and are not preempted (``Queues.streamed``).
- What it computes is shared with other requests when it has ended, no earlier.
- Where one of its requests is cancelled, its pages are given back when the step has ended: it still
  writes to them.

Nobody waits long for a prompt that takes seconds (``yield_share``):

- Short prompts are chunks of the main runner's steps meanwhile, for which the step is parked
  (``Yields``).
- While others wait, a chunk of it takes no longer than it must (``StreamedTimes``). Those that are
  shorter, but no chunks of main steps, have every second step for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...runner.batch import PrefillRunner
from ...runner.route import Route
from ..requests.request import Request, State
from .batch_writer import BatchWriter
from .chunks import Chunks
from .queues import Queues
from .routing_policy import RoutingPolicy
from .step import PrefillChunk, ScheduledStep
from .streamed_times import StreamedTimes
from .yields import Yields


class PrefillStream:
    """Steps of prompts in parallel with other steps, one at a time, with a batch of their own.

    Args:
        policy: says which way each step takes.
        yield_share: of a step's time, what others may take; 0: none, they wait for their turn.

    Attributes:
        yields: parks the step that runs.
        described: which prompts go which way, as one line.
    """

    def __init__(
        self,
        runner: PrefillRunner,
        queues: Queues,
        chunks: Chunks,
        policy: RoutingPolicy,
        yield_share: float,
    ) -> None:
        self._runner, self._queues, self._chunks, self._policy = runner, queues, chunks, policy
        self._writer = BatchWriter(runner, queues.manager)
        self._budget, self._rows = runner.max_num_batched_tokens, runner.max_num_logits
        self._yields_time = yield_share > 0
        self.yields = Yields(runner, yield_share)
        self._times = StreamedTimes(runner.least_seconds)
        self._short_last = False
        least = policy.least(runner.min_tokens, runner.max_others > 0)
        self.described = policy.described(runner.routes, least, yield_share)

    @property
    def busy(self) -> bool:
        """Whether a step is scheduled, or runs."""
        return bool(self._queues.streamed)

    @property
    def max_others(self) -> int:
        """Tokens of a step with chunks that is not of the prefill stream, at most."""
        return self._runner.max_others

    def others(self) -> list[Request]:
        """The prompts that may be chunks of the main runner's steps."""
        queues = self._queues
        if not self.busy:  # it has just declined these ones
            return queues.prefilling
        least = self.impatient or self._least()
        return [r for r in queues.prefilling if r not in queues.streamed and r.left < least]

    @property
    def impatient(self) -> int:
        """Prompts of fewer tokens do not wait for the step that runs; 0: none does."""
        if not self.busy or not self._yields_time:
            return 0
        return self._times.beside(self._least())

    def schedule(self, now: float, decoded_at: float) -> ScheduledStep | None:
        """The next step, as if it were launched; None: it is busy, or too little waits.

        It may be launched when the steps have ended that are launched by now.

        Args:
            decoded_at: when a request last decoded beside another one.
        """
        queues = self._queues
        if self.busy:
            return None
        budget = self._most_tokens()
        queues.admit(budget, self._budget, now, queues.prefilling)
        prompts = self._first(queues.prefilling, budget)
        chunks = self._chunks.of(prompts, budget, self._rows, self._budget)
        idle = 0.0 if queues.decoding else now - decoded_at
        tokens = sum(chunk.size for chunk in chunks)
        route = self._policy.route(self._runner.routes, tokens, self._least(), idle)
        if not chunks or route == Route.CHUNKED:
            return None
        self._short_last = all(r.left <= self._budget for r in prompts)
        step = self._written(chunks, route)
        queues.streamed = frozenset(chunk.request for chunk in chunks)
        for chunk in chunks:
            chunk.request.computed = chunk.last
        for request in step.sampled:
            request.drawn += 1
        return step

    def undo(self, step: ScheduledStep) -> None:
        """The step is not launched: it is scheduled anew."""
        for request in step.sampled:
            request.drawn -= 1
        for chunk in step.chunks:
            chunk.request.computed = chunk.first
        self._queues.end_streamed()

    def finished(self, step: ScheduledStep, whole: bool, seconds: float) -> None:
        """Called before what the step drew is appended: pages that it has filled are shared, if it
        is ``whole`` and has not failed.

        Args:
            seconds: that it ran.
        """
        queues = self._queues
        for request, first, size in step.chunks:
            if request.state is State.RUNNING and whole:
                queues.manager.commit(request.table, request.tokens, first + size)
                queues.computed(request, first + size)
                if request in step.sampled:
                    queues.prefilling.remove(request)
                    queues.decoding.append(request)
        if whole:
            self._times.record(step.T, seconds)
        queues.end_streamed()

    def _least(self) -> int:
        """A step of fewer tokens is for the other runner."""
        decoding = bool(self._queues.decoding)
        turning_point = self._runner.min_tokens if decoding else self._runner.min_alone
        return self._policy.least(turning_point, self.max_others > 0)

    def _most_tokens(self) -> int:
        """Tokens of the next step, at most."""
        queues = self._queues
        alone = not queues.decoding and queues.running + len(queues.waiting) <= 1
        if not self._yields_time or (alone and self.max_others):
            return self._budget
        return min(self._budget, max(self._least(), self._times.most_tokens()))

    def _first(self, prompts: Sequence[Request], budget: int) -> Sequence[Request]:
        """Those of the prompts that the next step reads: short ones alone in every second step, if
        that costs the long ones no more than these tokens' time. Those that are chunks of main
        steps are read there."""
        if not self._yields_time:
            return prompts
        least = self._least()
        prompts = [r for r in prompts if r.left >= least] or prompts
        short = [r for r in prompts if r.left <= self._budget]
        alone = short and not self._short_last and self._times.may_split(budget)
        return short if alone else prompts

    def _written(self, chunks: Sequence[PrefillChunk], route: str) -> ScheduledStep:
        batch = self._writer.write([], chunks)
        return ScheduledStep(
            batch,
            [],
            list(chunks),
            [chunk.request for chunk in chunks if chunk.completes],
            [chunk.request for chunk in chunks for _ in chunk.logprob_positions],
            any(sampling.params.logprobs is not None for sampling in batch.sampling),
            route=route,
        )
