"""What `pykernels profile step` records: an engine over a checkpoint, or over random weights of a
well-known shape, and a few of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pykernels.errors import PykernelsError
from pykernels.registry import resolve
from pykernels.target import detect
from runtime.extend import checked
from runtime.kv_cache.layout import PAGE
from runtime.make_runner import make_plan, make_runner
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import largest_step
from runtime.planning.lowerable import Pass
from runtime.profiling.engine_speed import EngineTimer, Load
from runtime.profiling.this_machine import this_machine
from runtime.tracing.recorder import Recorder
from runtime.tracing.timeline import Timeline
from runtime.workers.matrix import packer
from runtime.workers.pool import make_pool

from . import EMBEDDED
from .checkpoint.config import read_config
from .hub import name_of
from .load import load_engine
from .named import make_config
from .pinning.place import placement_of
from .random_model import check_memory, random_decoder

WARM_STEPS = 8
"""Decode steps before those that are recorded: they compile, and say what tracing costs."""


@dataclass(frozen=True)
class Subject:
    """What runs, and where.

    Attributes:
        path: a checkpoint; None: the embedded one, or ``arch``.
        arch: a name of ``named``: random weights in ``fmt``, ``layers`` of its
            layers (None: all).
        rules, execution, passes: as in ``load_engine``.
    """

    path: Path | None = None
    arch: str | None = None
    layers: int | None = None
    fmt: str = "q4_k"
    rules: Any = None
    execution: ExecutionConfig = ExecutionConfig()
    passes: tuple[Pass, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A profile.

    Attributes:
        timeline: the steps that were recorded.
        untraced_us: the median of decode steps that were not.
    """

    timeline: Timeline
    untraced_us: float


def profile_steps(subject: Subject, load: Load) -> Recorded:
    """Runs warm steps, then records a prompt (if ``load.prompt``) and ``load.tokens`` decode steps.

    Raises:
        PykernelsError: what ``load_engine`` raises; more positions than the model has; a step of
            more tasks than can be traced.
    """
    with _opened(subject, load) as (timer, title):
        if load.prompt:
            timer.prefill(load.prompt)
        timer.decode(load.batch, min(load.context, 64), 2)
        warm = timer.decode(load.batch, load.context, WARM_STEPS)
        recorder = Recorder(timer.runner, title)
        if load.prompt:
            timer.prefill(load.prompt, recorder)
        timer.decode(load.batch, load.context, load.tokens, recorder)
        untraced = 1e6 * median(step.seconds for step in warm)
        return Recorded(recorder.timeline(), untraced)


@contextmanager
def _opened(subject: Subject, load: Load) -> Iterator[tuple[EngineTimer, str]]:
    """An engine with room for the load, driven by this thread; and what it is, in words."""
    budget = max(512, load.batch)
    enough = replace(load, tokens=max(2 * load.tokens, WARM_STEPS))  # one ahead of each recorded
    positions, pages = enough.positions(budget), enough.pages(budget)
    if subject.arch is not None:
        with _random(subject, positions, pages, budget, load.batch) as timer:
            layers = len(timer.runner.model.layers)  # type: ignore[attr-defined]
            yield timer, _title(f"{subject.arch}, {layers} layers, {subject.fmt}", subject, timer)
        return
    path = subject.path or EMBEDDED
    name = "the embedded model" if path == EMBEDDED else name_of(path)
    _check_positions(name, positions, read_config(path).max_position_embeddings)
    with load_engine(
        path,
        rules=subject.rules,
        passes=subject.passes,
        execution=subject.execution,
        max_model_len=positions,
        max_num_seqs=load.batch,
        max_num_batched_tokens=budget,
        kv_tokens=pages * PAGE,
        draft="off",
        overlap=False,  # each step is recorded on its own
    ) as llm:
        llm.engine.threaded = False  # it has had no request yet, so it has no thread
        timer = EngineTimer(llm.runner, engine=llm.engine)
        yield timer, _title(name, subject, timer)


@contextmanager
def _random(
    subject: Subject, positions: int, pages: int, budget: int, batch: int
) -> Iterator[EngineTimer]:
    """Makes the timer of an engine with random weights."""
    execution, fmt = subject.execution, subject.fmt
    assert subject.arch is not None
    resolve(execution.kernel, fmt, detect())
    config = make_config(subject.arch, num_hidden_layers=subject.layers)
    _check_positions(subject.arch, positions, config.max_position_embeddings)
    check_memory(subject.arch, config, fmt)
    with make_pool(execution.threads, numa=execution.numa) as pool:
        decoder = random_decoder(config, fmt, packer(pool), execution.kernel, nodes=pool.memory)
        decoder = replace(decoder, kv_dtype=execution.kv_dtype)
        sizes = largest_step(positions, pages, budget, batch)
        placement = placement_of(execution, decoder, sizes)
        passes = [checked(each) for each in subject.passes]
        plan = make_plan(execution, decoder, positions, sizes, placement, passes, this_machine)
        runner = make_runner(plan, execution.device, decoder, pool)
        runner.load()
        timer = EngineTimer(runner.finished(), overlap=False)
        try:
            yield timer
        finally:
            timer.close()


def _check_positions(name: str, positions: int, most: int) -> None:
    if positions > most:
        raise PykernelsError(
            f"a sequence of {positions} tokens; {name} has {most} positions",
            "Give a smaller --context, --prefill or --steps",
        )


def _title(name: str, subject: Subject, timer: EngineTimer) -> str:
    """Names what is profiled, for the picture and the trace."""
    pool = timer.runner.pool
    threads = "" if pool is None else f", {pool.threads} worker{'s' * (pool.threads > 1)}"
    where = subject.execution.device
    if subject.execution.on_gpu:
        placement = timer.runner.plan.placement
        where += f", experts on the {'CPU' if placement.experts == 'cpu' else 'GPU'}"
    off = subject.execution.defer in (None, "off", 0)
    deferred = "" if off else f", experts deferred: {timer.runner.deferred}"
    microbatches = ", two microbatches" if timer.runner.dual_batch else ""
    own = "".join(f", pass {each.__name__}" for each in subject.passes)
    return f"{name} on {where}{threads}{deferred}{microbatches}{own}"
