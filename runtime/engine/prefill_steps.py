"""Runs the steps of the prefill stream, beside those of the engine."""

from __future__ import annotations

import math
from contextlib import suppress

from ..runner.batch import PrefillRunner
from ..runner.route import Route
from .drawn_tokens import DrawnTokens
from .results import check_drawn
from .scheduling.prefill_stream import PrefillStream
from .scheduling.step import ScheduledStep


class PrefillSteps:
    """Steps of prompts on a runner of their own, one at a time.

    Args:
        stream: schedules them.
    """

    def __init__(self, runner: PrefillRunner, stream: PrefillStream, drawn: DrawnTokens) -> None:
        self._runner, self._stream, self._drawn = runner, stream, drawn
        self._clock, self._stats = drawn.clock, drawn.stats
        self._step: ScheduledStep | None = None
        self._began = math.nan

    @property
    def running(self) -> bool:
        return self._step is not None

    @property
    def ended(self) -> bool:
        """Whether one runs, and its end need not be awaited."""
        return self._step is not None and self._runner.ready()

    def launch(self, step: ScheduledStep) -> None:
        """Start a step; if that fails its requests do."""
        self._stats.steps += 1
        try:
            if len(self._runner.routes) > 1:
                self._runner.take(step.route)
            self._runner.launch(step.batch)
        except BaseException as error:
            self._finished(step, whole=False)
            self._drawn.fail(step, error)
        else:
            self._step, self._began = step, self._clock()
            self._stream.yields.began(self._began)

    def park(self, others: bool) -> None:
        """The step waits while one with other prompts runs, and goes on behind it, unless it has
        GPUs of its own."""
        if self._step is not None and self._step.route != Route.DISAGGREGATED:
            self._stream.yields.update(others, self._clock())

    def end(self) -> None:
        """Deliver the tokens of the step, if one runs."""
        step, self._step = self._step, None
        if step is None:
            return
        try:
            result = self._runner.result()
            sampled_token_ids = result.sampled_token_ids[: step.R].tolist()
            check_drawn(sampled_token_ids, step.R, self._runner.vocab_size)
        except BaseException as error:
            self._finished(step, whole=False)
            self._drawn.fail(step, error)
            return
        self._drawn.count(step, sampled_token_ids)
        self._drawn.mask(step, sampled_token_ids)
        self._drawn.keep_routing(step, result)
        self._finished(step, whole=True)
        self._drawn.deliver(step, sampled_token_ids, result, self._clock() - self._began)

    def give_up(self) -> None:
        """Wait for the end of the step, if one runs, of which nobody reads what it drew."""
        step, self._step = self._step, None
        if step is not None:
            with suppress(Exception):
                self._runner.result()
            self._finished(step, whole=False)

    def _finished(self, step: ScheduledStep, whole: bool) -> None:
        seconds = self._stream.yields.ended(self._clock())
        self._stats.parked_seconds = self._stream.yields.seconds
        self._stream.finished(step, whole, seconds)
