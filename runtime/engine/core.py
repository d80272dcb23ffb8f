"""The engine without threads: one step after the other, and what becomes of the drawn tokens.

While a step runs, the tokens of the one before are delivered and the next one is scheduled, as if
every request went on. A step that needs nothing but the drawn tokens is launched at once, behind
the one that runs (``Runner.launch_behind``): then no Python is between the two. Other steps get the
tokens that are still missing, and are launched, when the step ends.

What the next step draws must not depend on that:

- Penalties count the tokens before the next step begins. End tokens are allowed from a number of
  tokens on, which the scheduler knows ahead.
- Where a constraint says what may come next, its mask follows from the token before: it is made
  while the next step computes its logits, if the runner's sampler waits for masks; else between two
  steps, before the next one is launched.
- Where an end token was drawn, or somebody has asked for something meanwhile, the step that was
  scheduled ahead is given up for one that knows of it: a row for nothing, or a request that waits
  for one step more, costs more than the overlap brings. So is it where pages are short, and where
  there are drafts behind what was drawn. Nothing is scheduled behind a step with drafts: how far
  they are accepted says where its requests are.
- A request that ends for a reason which shows later (a stop string, a deadline, an error of its
  consumer) has one row more, which nobody reads.

Prompts of the scheduler's prefill stream are a second step, which runs in parallel with these ones
(``PrefillStream``). Without overlap it is one of them: the next one begins when it has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat

from pykernels.errors import PykernelsError

from ..kv_cache import BlockManager
from ..kv_tiers.tiers import CLOSE_SECONDS, KvTiers
from ..runner.active import phase
from ..runner.batch import DeviceLost, PrefillRunner, Runner, StepResult
from .observation import Observation
from .requests.drafters import MakeDrafter
from .requests.outputs import EngineStats, FinishReason, TokenLogprob
from .requests.request import Request, State
from .results import check_drawn, logprob_of, write_routing
from .scheduling.config import EngineConfig
from .scheduling.drafts import Drafts
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep

_POLL_SECONDS = 2e-4
_POLLS = 100
"""Until it is looked whether somebody's time is up."""
MakeTiers = Callable[[BlockManager], KvTiers]


class Core:
    """Runs requests on a runner. Every method belongs to the one thread that owns it.

    Args:
        clock: seconds; the clock of the requests' deadlines.
        news: whether something waits to be done before the next step is scheduled.
        make_tiers: makes the levels behind the pages, once the runner is bound.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        news: Callable[[], bool] = lambda: False,
        make_drafter: MakeDrafter | None = None,
        make_tiers: MakeTiers | None = None,
    ) -> None:
        self.runner, self.clock, self._asked = runner, clock, news
        self.overlap = self._overlap = config.overlap
        self.stats = EngineStats()
        self._lost: dict[Request, Exception] = {}  # to constraints and drafters
        self._drafts: Drafts | None = None
        if make_drafter is not None:
            self._drafts = Drafts(make_drafter, config.draft_tokens, runner, self._lost)
        self.scheduler = Scheduler(runner, self.stats, config, self._drafts)
        runner.bind(self.scheduler.writer.batch)
        self.scheduler.add_prefill_stream(runner)
        if make_tiers is not None:
            self.scheduler.tiers = make_tiers(self.scheduler.manager)
        self._running: ScheduledStep | None = None
        self._prefill_step: ScheduledStep | None = None  # of the prefill stream
        self._launched_at = self._prefill_began = math.nan
        self._timed: set[Request] = set()
        self._routed: set[Request] = set()
        self._observation: Observation | None = None
        self._next_deadline = math.inf

    @property
    def busy(self) -> bool:
        """Whether a step runs, or one is to be done."""
        running = self._running is not None or self._prefill_step is not None
        return running or self.scheduler.busy

    def news(self) -> bool:
        """Whether something waits to be done before the next step is scheduled."""
        tiers = self.scheduler.tiers
        return self._asked() or (tiers is not None and tiers.has_news())

    def add(self, request: Request) -> None:
        request.state = State.WAITING
        if self.runner.deferred:
            request.table.output_from = request.prompt_size
        if (tiers := self.scheduler.tiers) is not None and tiers.shared:
            request.table.forks = True
        if self._drafts is not None:
            self._drafts.add(request)
        self.scheduler.add(request)
        if request.deadline < math.inf:
            self._timed.add(request)
            self._next_deadline = min(self._next_deadline, request.deadline)
        if request.routing is not None:
            self._routed.add(request)

    def cancel(self, request: Request) -> None:
        """End a request with what it has; nothing happens if it has ended, or was not added."""
        if request.state not in (State.NEW, State.FINISHED):
            self._end(request, "cancelled")

    def observe(self, observation: Observation) -> None:
        """The next steps run inside of it, one after the other without overlap; of two
        observations, the second one fails."""
        if self._observation is not None:
            observation.end(PykernelsError("Steps are observed already", "Try again later"))
        elif not observation.done.done():
            self._observation, self.overlap = observation, False

    def unobserve(self, observation: Observation) -> None:
        """Ends it, if it is the one that is on."""
        observation.end()
        if self._observation is observation:
            self._observation, self.overlap = None, self._overlap

    def end_all(self, error: BaseException | None = None) -> None:
        """Cancel every request, or let them fail with ``error``, when the step that runs ends."""
        if self._running is not None:
            self._running = None
            with suppress(Exception):  # nobody reads what it drew
                self.runner.result()
        if (prompts := self._prefill_step) is not None:
            self._prefill_step = None
            with suppress(Exception):
                self._prefill_runner.result()
            self.scheduler.finished_prefill(prompts, whole=False)
        for request in self.scheduler.requests():
            self._end(request, "error" if error else "cancelled", error)
        if self._observation is not None:
            self._observation.end(error or PykernelsError("The engine is closed", "Make a new one"))

    def close(self, lost: bool = False) -> None:
        """Behind ``end_all``: ends what works beside steps, which writes what is to be kept, unless
        the device is ``lost``."""
        if not lost:
            self._settle()
        if (tiers := self.scheduler.tiers) is not None:
            tiers.close(0.0 if lost else CLOSE_SECONDS)

    def step(self) -> bool:
        """Deliver the tokens of one step; False if there is nothing to do.

        The next step may run when this returns. An error of the runner ends the step's requests,
        with that error. ``DeviceLost``, and what is no ``Exception`` (Ctrl-C), is raised again
        after that.
        """
        if self._observation is None:
            return self._step()
        worked = self._observation.step(self._step)
        if self._observation.done.done():
            self.unobserve(self._observation)
        return worked

    def _settle(self) -> None:
        """No step runs or is to come: what the next one would begin with is done now."""
        if self.scheduler.tiers is not None:
            if copies := self.scheduler.take_state_copies():
                self.runner.copy_states(copies)
            self.scheduler.collect()

    def _step(self) -> bool:
        self.scheduler.collect()
        now = self.clock()
        if now >= self._next_deadline:
            self._expire(now)
        if self._prefill_step is not None and self._prefill_runner.ready():
            self._end_prefill()
        prompts = self.scheduler.schedule_prefill(now)
        if self._running is None:
            if prompts is not None:
                self._launch_prefill(prompts)
                if not self.overlap:
                    self._end_prefill()
                    return True
            first = self.scheduler.schedule(now)
            if first is None:
                return self._await_others()
            prompts = None
            if (failure := self._launch(first)) is not None:
                self._fail(first, failure)
                return True
        running = self._running
        assert running is not None
        alive = any(request.state is State.RUNNING for request in running.requests)
        ahead = None
        if self.overlap and not running.drafts:
            phase("schedule")
            ahead = self.scheduler.schedule(now, running)
            phase("run")
        behind = ahead is running and self._launch_behind(running)
        self._running = None
        try:
            result = self._result()
            sampled_token_ids = result.sampled_token_ids[: running.R].tolist()
            check_drawn(sampled_token_ids, running.R, self.runner.vocab_size)
        except BaseException as error:
            if ahead is not None:
                self.scheduler.undo(ahead)
            if prompts is not None:
                self.scheduler.undo_prefill(prompts)
            self._fail(running, error)
            return True
        seconds = self.clock() - self._launched_at
        running.accept(sampled_token_ids)
        self.scheduler.writer.set_tokens(result.sampled_token_ids)
        ended = self._count(running, sampled_token_ids)
        if not self.runner.late_masks:
            ended |= self._mask(running, sampled_token_ids)
        if self._routed:
            write_routing(running, result)
        failure = None
        if behind and self.runner.next_runs:
            self.stats.steps += 1
            self._launched(running)
        elif ahead is not None:
            drafts = self.scheduler.has_drafts(running, sampled_token_ids)
            if ended or drafts or self.news():
                self.scheduler.undo(ahead)
            else:
                if running.scored:
                    result = result.copy()
                failure = self._launch(ahead, masked=False)
        if self.runner.late_masks:
            try:
                self._mask(running, sampled_token_ids)
            finally:
                if self._running is not None and ahead is not None and ahead.masked:
                    self.runner.write_masks()
        if prompts is not None:
            self._launch_prefill(prompts)
        self.scheduler.timed(running, seconds)
        phase("deliver")
        self._deliver(running, sampled_token_ids, result, seconds)
        if ahead is not None and failure is not None:
            self._fail(ahead, failure)
        if not self.busy:
            self._settle()
        return alive or self.busy

    def _launch(self, step: ScheduledStep, masked: bool = True) -> BaseException | None:
        """Start a step, whose masks are there if it is ``masked``; its error if that fails."""
        self.stats.steps += 1
        if copies := self.scheduler.take_state_copies():
            self.runner.copy_states(copies)
        try:
            self.runner.launch(step.batch)
        except BaseException as error:
            return error
        if masked and step.masked and self.runner.late_masks:
            self.runner.write_masks()
        self._launched(step)
        return None

    def _launched(self, step: ScheduledStep) -> None:
        self._running, self._launched_at = step, self.clock()
        self.scheduler.launched(step)

    def _result(self) -> StepResult:
        try:
            return self.runner.result()
        finally:
            self.scheduler.ended()

    def _launch_behind(self, step: ScheduledStep) -> bool:
        """Launch a step's successor, which has the same requests, while it runs; False if that must
        wait for its end."""
        if step.scored or step.counted or step.masked or self._routed or self.news():
            return False
        if self.scheduler.copies_states or self.scheduler.may_draft(step):
            return False
        if not self.runner.launch_behind(step.batch, step.ends):
            return False
        if self.news():  # it came before there was anything to give up
            self.runner.give_up_next()
        return True

    @property
    def _prefill_runner(self) -> PrefillRunner:
        assert self.runner.prefill_runner is not None
        return self.runner.prefill_runner

    def _launch_prefill(self, step: ScheduledStep) -> None:
        self.stats.steps += 1
        try:
            self._prefill_runner.launch(step.batch)
        except BaseException as error:
            self._fail_prefill(step, error)
        else:
            self._prefill_step, self._prefill_began = step, self.clock()

    def _await_others(self) -> bool:
        """Nothing else is to be done: waits for the prefill stream's step, for pages that are being
        read, or until somebody asks for something. False if there is none of these."""
        if self._prefill_step is None and not self.scheduler.loading:
            return False
        for _ in range(_POLLS):
            if self._prefill_step is not None and self._prefill_runner.ready():
                break
            if self.news():
                break
            time.sleep(_POLL_SECONDS)
        return True

    def _end_prefill(self) -> None:
        """Deliver the tokens of the prefill stream's step, if one runs."""
        step, self._prefill_step = self._prefill_step, None
        if step is None:
            return
        try:
            result = self._prefill_runner.result()
            sampled_token_ids = result.sampled_token_ids[: step.R].tolist()
            check_drawn(sampled_token_ids, step.R, self.runner.vocab_size)
        except BaseException as error:
            self._fail_prefill(step, error)
            return
        self._count(step, sampled_token_ids)
        self._mask(step, sampled_token_ids)
        if self._routed:
            write_routing(step, result)
        self.scheduler.finished_prefill(step, whole=True)
        self._deliver(step, sampled_token_ids, result, self.clock() - self._prefill_began)

    def _fail_prefill(self, step: ScheduledStep, error: BaseException) -> None:
        self.scheduler.finished_prefill(step, whole=False)
        self._fail(step, error)

    def _fail(self, step: ScheduledStep, error: BaseException) -> None:
        self.stats.failed_steps += 1
        for request in step.requests:
            if request.state is State.RUNNING:
                self._end(request, "error", error)
        self.scheduler.failed(step)
        if isinstance(error, DeviceLost) or not isinstance(error, Exception):
            raise error

    def _count(self, step: ScheduledStep, sampled_token_ids: list[int]) -> bool:
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

    def _mask(self, step: ScheduledStep, sampled_token_ids: list[int]) -> bool:
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
                    self._lost[request] = error
                    request.masked.mask[:] = -1  # a row that nobody reads may have begun
        return bool(self._lost)

    def _deliver(
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
        if not step.chunks:
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
                    self._end(request, "error", error)

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
        lost = self._lost.pop(request, None)
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
        if lost is not None:
            raise lost
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
        self._routed.discard(request)
        self._lost.pop(request, None)
        request.state, request.reason, request.error = State.FINISHED, reason, error
        self.stats.finished += 1
        with suppress(RuntimeError):  # a consumer's event loop that is closed
            request.sink((request, token, logprob, text, reason))

    def _expire(self, now: float) -> None:
        for request in [r for r in self._timed if r.deadline <= now]:
            self._end(request, "deadline")
        self._next_deadline = min((r.deadline for r in self._timed), default=math.inf)


def _ends(request: Request, token: int) -> bool:
    """Whether a token that is not yet appended ends a request."""
    return token in request.end_ids and request.num_output_tokens >= request.min_tokens
