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

from pykernels.errors import PykernelsError

from ..kv_cache import BlockManager
from ..kv_tiers.tiers import CLOSE_SECONDS, KvTiers
from ..runner.active import phase
from ..runner.batch import Runner, StepResult
from .drawn_tokens import DrawnTokens
from .observation import Observation
from .pace import Pace
from .prefill_steps import PrefillSteps
from .requests.drafters import MakeDrafter
from .requests.outputs import EngineStats
from .requests.request import Request, State
from .results import check_drawn
from .scheduling.config import EngineConfig
from .scheduling.drafts import drafts_of
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
        self.stats, self.pace = EngineStats(), Pace()
        lost: dict[Request, Exception] = {}  # to constraints and drafters
        self._drafts = drafts_of(config, make_drafter, runner, lost)
        self.scheduler = Scheduler(runner, self.stats, config, self._drafts)
        runner.bind(self.scheduler.writer.batch)
        stream = self.scheduler.add_prefill_stream(runner)
        if make_tiers is not None:
            assert self.scheduler.manager.windows is None, "levels take pages of all layers"
            self.scheduler.tiers = make_tiers(self.scheduler.manager)
        self._drawn = DrawnTokens(self.scheduler, self.stats, lost, clock)
        self._prefill: PrefillSteps | None = None
        if stream is not None and runner.prefill_runner is not None:
            self._prefill = PrefillSteps(runner.prefill_runner, stream, self._drawn)
        self._running: ScheduledStep | None = None
        self._launched_at = math.nan
        self._observation: Observation | None = None

    @property
    def busy(self) -> bool:
        """Whether a step runs, or one is to be done."""
        running = self._running is not None or self._prefill_runs
        return running or self.scheduler.busy

    @property
    def _prefill_runs(self) -> bool:
        return self._prefill is not None and self._prefill.running

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
        self._drawn.add(request)

    def cancel(self, request: Request) -> None:
        """End a request with what it has; nothing happens if it has ended, or was not added."""
        if request.state not in (State.NEW, State.FINISHED):
            self._drawn.end(request, "cancelled")

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
        if self._prefill is not None:
            self._prefill.give_up()
        for request in self.scheduler.requests():
            self._drawn.end(request, "error" if error else "cancelled", error)
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
        try:
            return self._next_step()
        finally:
            self._yield()

    def _next_step(self) -> bool:
        self.scheduler.collect()
        now = self.clock()
        self._drawn.expire(now)
        beside = self._prefill
        if beside is not None and beside.ended:
            beside.end()
        prompts = self.scheduler.schedule_prefill(now)
        if self._running is None:
            if beside is not None and prompts is not None:
                beside.launch(prompts)
                if not self.overlap:
                    beside.end()
                    return True
            first = self.scheduler.schedule(now)
            if first is None:
                return self._await_others()
            prompts = None
            if (failure := self._launch(first)) is not None:
                self._drawn.fail(first, failure)
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
            self._drawn.fail(running, error)
            return True
        ended = self.clock()
        seconds = ended - self._launched_at
        self._time(running, ended)
        running.accept(sampled_token_ids)
        self.scheduler.writer.set_tokens(result.sampled_token_ids)
        stops = self._drawn.count(running, sampled_token_ids)
        if not self.runner.late_masks:
            stops |= self._drawn.mask(running, sampled_token_ids)
        self._drawn.keep_routing(running, result)
        failure = None
        if behind and self.runner.next_runs:
            self.stats.steps += 1
            self._launched(running)
        elif ahead is not None:
            drafts = self.scheduler.has_drafts(running, sampled_token_ids)
            if stops or drafts or self.news():
                self.scheduler.undo(ahead)
            else:
                if running.scored:
                    result = result.copy()
                failure = self._launch(ahead, masked=False)
        if self.runner.late_masks:
            try:
                self._drawn.mask(running, sampled_token_ids)
            finally:
                if self._running is not None and ahead is not None and ahead.masked:
                    self.runner.write_masks()
        if beside is not None and prompts is not None:
            beside.launch(prompts)
        self.scheduler.timed(running, seconds)
        phase("deliver")
        self._drawn.deliver(running, sampled_token_ids, result, seconds)
        if self._drafts is not None:
            self._drafts.watch(running)
        if ahead is not None and failure is not None:
            self._drawn.fail(ahead, failure)
        if not self.busy:
            self._settle()
        return alive or self.busy

    def _time(self, step: ScheduledStep, ended: float) -> None:
        """Counts a step that has ended among those by which predictions are judged."""
        alone = not (step.chunks or self._prefill_runs) and self._observation is None
        if self._drafts is not None:
            self._drafts.timed(step, ended, alone)
        if self.pace.found is not None:
            return
        if alone and not step.drafts:
            self.pace.add(step.decoding, ended)
        else:
            self.pace.pause()

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
        self._yield()

    def _result(self) -> StepResult:
        try:
            return self.runner.result()
        finally:
            self.scheduler.ended()

    def _launch_behind(self, step: ScheduledStep) -> bool:
        """Launch a step's successor, which has the same requests, while it runs; False if that must
        wait for its end."""
        if step.scored or step.counted or step.masked or self._drawn.routed or self.news():
            return False
        if self.scheduler.copies_states or self.scheduler.may_draft(step):
            return False
        if not self.runner.launch_behind(step.batch, step.ends):
            return False
        if self.news():  # it came before there was anything to give up
            self.runner.give_up_next()
        return True

    def _yield(self) -> None:
        """The prefill stream's step is parked while one with other prompts runs."""
        if self._prefill is not None:
            self._prefill.park(self._running is not None and bool(self._running.chunks))

    def _await_others(self) -> bool:
        """Nothing else is to be done: waits for the prefill stream's step, for pages that are being
        read, or until somebody asks for something. False if there is none of these."""
        if not self._prefill_runs and not self.scheduler.loading:
            return False
        for _ in range(_POLLS):
            if (self._prefill is not None and self._prefill.ended) or self.news():
                break
            time.sleep(_POLL_SECONDS)
        return True
