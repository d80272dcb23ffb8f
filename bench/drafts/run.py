"""Steps that check 0, 1, 2, ... drafts of one sequence, in turns, beside what is predicted.

Drafts are random tokens, almost all of them wrong: a step takes as long whatever they are, and the
tokens choose experts as those of different texts do. Drafts of a text that repeats itself choose
fewer different ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Any

import numpy as np

from runtime.devices.sim.cost import Load as SimulatedLoad
from runtime.devices.sim.drafts import draft_forecast
from runtime.devices.sim.machine import Machine
from runtime.engine import Engine, EngineConfig, SamplingParams
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import ExecutionPlan
from runtime.profiling.engine_speed import Load
from runtime.runner.paged_runner import PagedRunner

from ..e2e.ours import Ours

Row = dict[str, Any]
_WARM = 3


def rows(
    ours: Ours,
    execution: ExecutionConfig,
    machine: Machine,
    most: int,
    context: int,
    steps: int,
    rounds: int,
    step: Callable[[str], None] = lambda name: None,
) -> Iterator[Row]:
    """A row for each number of drafts up to ``most``: milliseconds, and times as long as without.

    Args:
        machine: by which steps are predicted; ``steps``: of each round and number of drafts.
    """
    step("compiling")
    # A draft may be right, then a step draws more tokens than one.
    tokens = (_WARM + steps) * (1 + most)
    load = Load(context, tokens, 1, context)

    def with_rows(plan: ExecutionPlan) -> ExecutionPlan:
        return replace(plan, sizes=replace(plan.sizes, logits=1 + most))

    runner = ours.runner(load, execution, change=with_rows)
    try:
        told = SimulatedLoad(1, context)
        forecast = draft_forecast(runner.plan, runner.model, machine, told, most)
        seconds, checked = _timed(runner, most, context, steps, rounds, step)
        plain = quantiles(seconds[0], n=10)
        for drafts, found in enumerate(seconds):
            p10, *_, p90 = quantiles(found, n=10)
            median = quantiles(found, n=2)[0]
            yield {
                "drafts": drafts,
                "us_per_step": round(median * 1e6, 1),
                "us_p10": round(p10 * 1e6, 1),
                "us_p90": round(p90 * 1e6, 1),
                "times": round(median / plain[4], 3),
                "predicted": round(forecast.times[drafts - 1], 3) if drafts else 1.0,
                "checked": round(checked[drafts] / rounds / (_WARM + steps), 3),
                "pays_from": drafts and forecast.break_even[drafts - 1],
            }
    finally:
        runner.close()


class _Guesses:
    """Drafts at random; ``count``: how many in a step."""

    def __init__(self, vocab_size: int) -> None:
        self._random, self._vocab_size = np.random.default_rng(1), vocab_size
        self.count = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See ``Drafter``."""
        return self._random.integers(0, self._vocab_size, min(most, self.count)).tolist()


def _timed(
    runner: PagedRunner,
    most: int,
    context: int,
    steps: int,
    rounds: int,
    step: Callable[[str], None],
) -> tuple[list[list[float]], list[int]]:
    """Seconds of steps by number of drafts, and how many drafts were checked."""
    guesses, found = _Guesses(runner.vocab_size), [list[float]() for _ in range(1 + most)]
    checked = [0] * (1 + most)
    prompt = np.random.default_rng(2).integers(0, runner.vocab_size, context).tolist()
    config = EngineConfig(draft_tokens=most)
    with Engine(runner, threaded=False, config=config, drafter=lambda: guesses) as engine:
        for number in range(rounds):
            for drafts, seconds in enumerate(found):
                step(f"round {number + 1}, {drafts} drafts")
                guesses.count = drafts
                tokens = (_WARM + steps) * (1 + most)
                params = SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True)
                handle = engine.submit(prompt, params)
                request = handle.requests[0]
                while not request.num_output_tokens:
                    engine.step()
                before = engine.stats.draft_tokens
                for place in range(_WARM + steps):
                    begin = time.perf_counter()
                    engine.step()
                    if place >= _WARM:
                        seconds.append(time.perf_counter() - begin)
                checked[drafts] += engine.stats.draft_tokens - before
                handle.cancel()
                engine.step()
    return found, checked
