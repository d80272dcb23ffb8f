"""Decode steps at growing contexts, each beside what the simulated device says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.harness.timing.rows import attempt, reason
from model.cli.shared.common import note
from pykernels.errors import PykernelsError
from runtime.devices.sim.machine import Machine
from runtime.planning.config import ExecutionConfig
from runtime.planning.placement import CPU
from runtime.profiling.engine_speed import EngineTimer, Load, decode_speed

from ..e2e.ours import STEP_TOKENS, Ours, roof
from ..papers.rows import ACTUAL, of_contexts
from ..papers.validate import predicted

Row = dict[str, Any]
Step = Callable[[str], None]
"""Called before each part with its name."""
KEPT = (
    "us_per_step",
    "us_p10",
    "us_p90",
    "bytes_per_step",
    "roof_gbps",
    "cpu_busy",
    "wait_us_per_layer",
)
_WARM = 4


def plan(contexts: Sequence[int], batches: Sequence[int], defers: Sequence[str]) -> list[Row]:
    """Lists, for each row, the columns that name it."""
    return [
        {"defer": defer, "batch": batch, "context": context}
        for defer in defers
        for batch in batches
        for context in contexts
    ]


def fitting(ours: Ours, contexts: Sequence[int], batches: Sequence[int], steps: int) -> list[int]:
    """The contexts that a model has positions for; the others are told in a note.

    Raises:
        PykernelsError: there is none.
    """
    loads = {c: Load(1, steps + _WARM, max(batches), c, filled=True) for c in contexts}
    budget = max(STEP_TOKENS, max(batches))
    fit = [c for c, load in loads.items() if load.positions(budget) <= ours.max_model_len]
    has = f"{ours.name} has {ours.max_model_len} positions"
    if not fit:
        raise PykernelsError(f"a context of {min(contexts)} tokens; {has}", "Give other --contexts")
    if left := [f"{c:,}" for c in contexts if c not in fit]:
        note(f"without contexts of {', '.join(left)} tokens: {has}")
    return fit


def rows(
    ours: Ours,
    execution: ExecutionConfig,
    machine: Machine,
    contexts: Sequence[int],
    batches: Sequence[int],
    defers: Sequence[str],
    steps: int,
    head: Mapping[str, Any],
    step: Step = lambda name: None,
) -> Iterator[Row]:
    """A row for each of ``plan``; one that fails has ``why``.

    Args:
        machine: by which steps are predicted; ``head``: what the rows have in common.
    """
    for defer in defers:
        for batch in batches:
            names = plan(contexts, [batch], [defer])
            step(f"{batch} sequences, defer {defer}: compiling")
            load = Load(1, steps + _WARM, batch, max(contexts), filled=True)
            try:
                timer = ours.timer(load, replace(execution, defer=defer))
            except Exception as error:
                yield from ({**named, "why": reason(error)} for named in names)
                continue
            try:
                for named in names:
                    step(f"{batch} sequences, defer {defer}: {named['context']} tokens")
                    measure = partial(_measured, ours, timer, batch, named["context"], steps)
                    row = named | attempt(measure)
                    yield row | attempt(partial(_beside, row, machine, {**head, "rows": [row]}))
            finally:
                timer.close()
                timer.runner.close()


def _measured(ours: Ours, timer: EngineTimer, batch: int, context: int, steps: int) -> Row:
    times = timer.decode(batch, context, _WARM + steps, filled=True)[_WARM:]
    runner = timer.runner
    threads = ours.pool.threads
    found = decode_speed(times, runner.decode_steps[0].program, batch, ours.layers, roof(threads))
    return {
        "steps": steps,
        "tok_s": found.decode_tok_s,
        **{key: getattr(found, key) for key in KEPT},
        "experts": "cpu" if runner.plan.placement.experts == CPU else "gpu",
        "deferred": runner.deferred,
        "lanes": 2 if batch > 1 and runner.dual_batch else 1,
    }


def _beside(row: Row, machine: Machine, data: Mapping[str, Any]) -> Row:
    """The columns of a measured row's prediction."""
    if "why" in row:
        return {}
    (found,) = predicted(list(of_contexts("", "", ACTUAL, data)), machine)
    return {
        "predicted_us": round(found.predicted, 1),
        "error": round(found.error, 4),
        "bound": found.bound,
    }
