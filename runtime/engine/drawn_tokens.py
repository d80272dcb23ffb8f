"""What becomes of the tokens that a step has drawn: each is appended to its request, which is told,
and ends where its tokens, its text, its time or an error say so."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat

from ..runner.batch import DeviceLost, StepResult
from .requests.outputs import EngineStats, FinishReason, TokenLogprob
from .requests.request import Request, State
from .results import logprob_of, write_routing
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep


class DrawnTokens:
    """Delivers what steps have drawn, in the one thread that owns the engine.

    Args:
        lost: requests that failed, each with what it failed with: its constraint or drafter.
        clock: seconds; the clock of the requests' deadlines.

    Attributes:
        routed: requests that ask for the experts of their tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        lost: dict[Request, Exception],
        clock: Callable[[], float],
    ) -> None:
        self.scheduler, self.stats, self.lost, self.clock = scheduler, stats, lost, clock
        self.routed: set[Request] = set()
        self._timed: set[Request] = set()
        self._next_deadline = math.inf

    def add(self, request: Request) -> None:
        """One that was added to the scheduler."""
        if request.deadline < math.inf:
            self._timed.add(request)
            self._next_deadline = min(self._next_deadline, request.deadline)
        if request.routing is not None:
            self.routed.add(request)

    def keep_routing(self, step: ScheduledStep, result: StepResult) -> None:
        """What a step's routers chose goes to the requests that ask for it."""
        if self.routed:
            write_routing(step, result)

    def fail(self, step: ScheduledStep, error: BaseException) -> None:
        """A step has failed, and its requests with it; raises what ends the engine."""
        self.stats.failed_steps += 1
        for request in step.requests:
            if request.state is State.RUNNING:
                self.end(request, "error", error)
        self.scheduler.failed(step)
        if isinstance(error, DeviceLost) or not isinstance(error, Exception):
            raise error

    def count(self, step: ScheduledStep, sampled_token_ids: list[int]) -> bool:
        """What must be done before the next step: penalties count what was drawn.

        Returns:
            Whether an end token is among it.
        """
        for row, request in step.counted:
            if request.state is State.RUNNING:
                assert request.sampling.counts is not None
                request.sampling.counts.add(sampled_token_ids[row])
        if step.ends.isdisjoint(sampled_token_ids):
            return False
        pairs = zip(step.sampled, step.rows, strict=True)
        return any(_ends(request, sampled_token_ids[row]) for request, row in pairs)

    def mask(self, step: ScheduledStep, sampled_token_ids: list[int]) -> bool:
        """Constraints say what may follow.

        Returns:
            Whether one of them has failed.
        """
        for row, request in step.masked:
            token = sampled_token_ids[row]
            last = request.num_output_tokens + 1 >= request.max_tokens
            if request.state is State.RUNNING and not last and not _ends(request, token):
                assert request.masked is not None
                try:
                    request.masked.accept(token)
                except Exception as error:  # it fails alone, unless a stop string ends it here
                    self.lost[request] = error
                    request.masked.mask[:] = -1  # a row that nobody reads may have begun
        return bool(self.lost)

    def deliver(
        self,
        step: ScheduledStep,
        sampled_token_ids: list[int],
        result: StepResult,
        seconds: float,
    ) -> None:
        """Append a step's tokens, and end or tell whom they are for."""
        self.scheduler.finished(step)
        stats, sampled = self.stats, step.sampled
        stats.computed_tokens += step.T
        if step.drafts:
            stats.draft_tokens += sum(map(len, step.drafts))
            stats.accepted_tokens += sum(step.num_accepted)
        if step.chunks:
            stats.prompt_steps[step.route] += 1
        else:
            stats.decode_steps[step.T] += 1
            stats.decode_seconds += seconds
        for i, request in enumerate(step.logprob_requests, step.drawn):
            if request.state is State.RUNNING:
                top = request.params.logprobs or 0
                request.prompt_logprobs.append(logprob_of(sampled_token_ids[i], top, i, result))
        now = self.clock()
        accepted = chain(step.num_accepted, repeat(0))
        for request, first, more in zip(sampled, step.rows, accepted, strict=False):
            for row in range(first, first + 1 + more):
                if request.state is not State.RUNNING:  # it has ended, here or meanwhile
                    break
                stats.new_tokens += 1
                try:
                    if row > first and request.routing is not None:  # of an accepted draft
                        at = len(request.tokens) - 1
                        request.routing.write(at, row, row + 1, result.routing)
                    self._append(request, sampled_token_ids[row], row, result, now)
                except Exception as error:  # of its detokenizer, constraint or consumer: it alone
                    self.end(request, "error", error)

    def _append(
        self, request: Request, token: int, row: int, result: StepResult, now: float
    ) -> None:
        request.tokens.append(token)
        num_output_tokens = len(request.tokens) - request.prompt_size
        request.last_at = now
        if math.isnan(request.first_at):
            request.first_at = now
        logprob = None
        if (top := request.params.logprobs) is not None:
            logprob = logprob_of(token, top, row, result)
            request.logprobs.append(logprob)
        lost = self.lost.pop(request, None)
        text, stopped, may_end = "", False, num_output_tokens > request.min_tokens
        reason: FinishReason | None = None
        if may_end and token in request.end_ids:
            reason = "stop"
        elif request.text is not None:
            text, stopped = request.text.push(token, check=may_end)
        if stopped:
            reason = "stop"
        elif reason is None and num_output_tokens >= request.max_tokens:
            reason = "length"
        if reason is not None:
            self.end(request, reason, None, token, logprob, text, cut=stopped)
            return
        if lost is not None:
            raise lost
        if request.streamed:
            request.sink((request, token, logprob, text, None))

    def end(
        self,
        request: Request,
        reason: FinishReason,
        error: BaseException | None = None,
        token: int = -1,
        logprob: TokenLogprob | None = None,
        text: str = "",
        cut: bool = False,
    ) -> None:
        """Take a request out and tell its consumer; ``cut``: a stop string has ended its text."""
        if request.text is not None and error is None and not cut:
            try:
                rest, stopped = request.text.finish()
            except Exception as failure:
                reason, error = "error", failure
            else:
                text += rest
                reason = "stop" if stopped else reason
        self.scheduler.remove(request)
        self._timed.discard(request)
        self.routed.discard(request)
        self.lost.pop(request, None)
        request.state, request.reason, request.error = State.FINISHED, reason, error
        self.stats.finished += 1
        with suppress(RuntimeError):  # a consumer's event loop that is closed
            request.sink((request, token, logprob, text, reason))

    def expire(self, now: float) -> None:
        """Ends requests whose time is up."""
        if now < self._next_deadline:
            return
        for request in [r for r in self._timed if r.deadline <= now]:
            self.end(request, "deadline")
        self._next_deadline = min((r.deadline for r in self._timed), default=math.inf)


def _ends(request: Request, token: int) -> bool:
    """Whether a token that is not yet appended ends a request."""
    return token in request.end_ids and request.num_output_tokens >= request.min_tokens
