"""The engine without threads: one step after the other, and what becomes of the drawn tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from ..tracing.active import phase
from .batch import DeviceLost, Runner, StepResult
from .config import EngineConfig
from .outputs import EngineStats, FinishReason, TokenLogprob
from .request import Request, State
from .scheduling.scheduler import Scheduler


class Core:
    """Runs requests on a runner. Every method belongs to the one thread that owns it.

    Args:
        clock: seconds; the clock of the requests' deadlines.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner, self.clock = runner, clock
        self.stats = EngineStats()
        self.scheduler = Scheduler(runner, self.stats, config)
        runner.bind(self.scheduler.writer.batch)
        self._timed: set[Request] = set()
        self._next_deadline = math.inf

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> None:
        request.state = State.WAITING
        self.scheduler.add(request)
        if request.deadline < math.inf:
            self._timed.add(request)
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request: Request) -> None:
        """End a request with what it has; nothing happens if it has ended, or was not added."""
        if request.state not in (State.NEW, State.FINISHED):
            self._end(request, "cancelled")

    def end_all(self, error: BaseException | None = None) -> None:
        """Cancel every request, or let them fail with ``error``."""
        for request in self.scheduler.requests():
            self._end(request, "error" if error else "cancelled", error)

    def step(self) -> bool:
        """One step of the runner; False if there is nothing to do.

        An error of the runner ends the step's requests, with that error. ``DeviceLost``, and what
        is no ``Exception`` (Ctrl-C), is raised again after that.
        """
        now = self.clock()
        if now >= self._next_deadline:
            self._expire(now)
        batch = self.scheduler.schedule(now)
        if batch is None:
            return False
        stats = self.stats
        stats.steps += 1
        try:
            result = self.runner.step(batch)
            sampled_token_ids = result.sampled_token_ids[: batch.R].tolist()
            self._check(sampled_token_ids, batch.R)
        except BaseException as error:
            stats.failed_steps += 1
            for request in self.scheduler.in_step():
                self._end(request, "error", error)
            if isinstance(error, DeviceLost) or not isinstance(error, Exception):
                raise
            return True
        phase("deliver")
        self.scheduler.timed(self.clock() - now)
        self.scheduler.computed(result.sampled_token_ids)
        stats.computed_tokens += batch.T
        sampled, logprob_requests = self.scheduler.sampled, self.scheduler.logprob_requests
        stats.new_tokens += len(sampled)
        for i, request in enumerate(logprob_requests, len(sampled)):
            top = request.params.logprobs or 0
            request.prompt_logprobs.append(_logprob(sampled_token_ids[i], top, i, result))
        now = self.clock()
        for i, request in enumerate(sampled):
            try:
                self._append(request, sampled_token_ids[i], i, result, now)
            except Exception as error:  # of its detokenizer, constraint or consumer: it fails alone
                self._end(request, "error", error)
        return True

    def _check(self, sampled_token_ids: list[int], R: int) -> None:
        # An id out of range would be an address out of range in the next step.
        if len(sampled_token_ids) != R:
            raise RuntimeError(f"the runner gave {len(sampled_token_ids)} tokens for {R} rows")
        if R and not 0 <= min(sampled_token_ids) <= max(sampled_token_ids) < self.runner.vocab_size:
            raise RuntimeError(
                f"the runner drew a token outside the vocabulary: {sampled_token_ids}"
            )

    def _append(
        self, request: Request, token: int, row: int, result: StepResult, now: float
    ) -> None:
        request.tokens.append(token)
        num_output_tokens = len(request.tokens) - request.prompt_size
        request.last_at = now
        if num_output_tokens == 1:
            request.first_at = now
        if (counts := request.sampling.counts) is not None:
            counts.add(token)
        logprob = None
        if (top := request.params.logprobs) is not None:
            logprob = _logprob(token, top, row, result)
            request.logprobs.append(logprob)
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
            self._end(request, reason, None, token, logprob, text, cut=stopped)
            return
        if request.masked is not None:
            request.masked.accept(token)
        if num_output_tokens == request.min_tokens:
            request.allow_end()
            self.scheduler.changed()
        if request.streamed:
            request.sink((request, token, logprob, text, None))

    def _end(
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
        request.state, request.reason, request.error = State.FINISHED, reason, error
        self.stats.finished += 1
        with suppress(RuntimeError):  # a consumer's event loop that is closed
            request.sink((request, token, logprob, text, reason))

    def _expire(self, now: float) -> None:
        for request in [r for r in self._timed if r.deadline <= now]:
            self._end(request, "deadline")
        self._next_deadline = min((r.deadline for r in self._timed), default=math.inf)


def _logprob(token: int, top: int, row: int, result: StepResult) -> TokenLogprob:
    if result.logprobs is None:
        raise RuntimeError("the runner gave no logprobs")
    pairs: tuple[tuple[int, float], ...] = ()
    if top:
        if result.top_ids is None or result.top_logprobs is None:
            raise RuntimeError("the runner gave no top logprobs")
        ids, values = result.top_ids[row, :top].tolist(), result.top_logprobs[row, :top].tolist()
        pairs = tuple(zip(ids, values, strict=True))
    return TokenLogprob(token, float(result.logprobs[row]), pairs)
