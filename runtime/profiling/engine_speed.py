"""The speed of a whole model through the engine: prompts, and decode steps at a context.

The engine has no thread here: the caller's drives it step by step, so that each step is timed. A
step's time is all that the next one waits for: the jobs of the ring, and the engine's work between
the steps or, where it takes longer, beside them.
Prompts are random tokens, never the same twice, so that none is found in the prefix cache.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from pykernels.errors import PykernelsError

from ..devices.cpu.step import CpuExecutable
from ..engine import Engine, EngineConfig, RequestHandle, SamplingParams, StepResult
from ..engine.observation import Observer
from ..kv_cache.layout import PAGE
from ..planning.work import cache_bytes, weight_bytes
from ..program import Program
from ..runner.paged_runner import PagedRunner
from ..workers.busy import BusyTimes
from .filled import fill_context

TEMPERATURE = 1.0
"""Tokens are drawn, not the likeliest: each step then routes to other experts."""
_EVERY = 8


@dataclass(frozen=True)
class Load:
    """The work that an engine is timed on.

    Attributes:
        prompt: tokens of a prompt whose time is taken.
        tokens: decode steps.
        batch: sequences at once.
        context: tokens in each one's cache before the first of these steps.
        filled: whether these are random keys and values, and no prompt is read (``filled``).
    """

    prompt: int
    tokens: int
    batch: int = 1
    context: int = 1
    filled: bool = field(default=False, kw_only=True)

    def pages(self, max_num_batched_tokens: int) -> int:
        """Pages of the cache: all sequences to their ends, the scheduler's page of reserve
        for each, and a prompt beside them."""
        each = -(-self.positions(max_num_batched_tokens) // PAGE) + 1
        return self.batch * each + -(-self.prompt // PAGE) + 2

    def positions(self, max_num_batched_tokens: int) -> int:
        """Positions of the longest sequence; the first one decodes while the last one's prompt is
        under way."""
        read = PAGE if self.filled else self.context
        chunks = _chunks(self.batch, read, max_num_batched_tokens)
        return max(self.prompt, self.context + chunks + self.tokens) + 2


def _chunks(batch: int, context: int, max_num_batched_tokens: int) -> int:
    """Steps until all prompts are in, at most."""
    return -(-batch * context // max(1, max_num_batched_tokens - batch)) + 1


@dataclass(frozen=True)
class StepTime:
    """One decode step.

    Attributes:
        seconds: time of the engine's step.
        jobs: seconds from the jobs' publishing to the last one's completion.
        busy: seconds of its jobs in which workers had something to do, if their share is that of
            a step shortly before; ``wait``: the mean of the CPU's waits for a GPU in that step.
        tokens: number that it drew.
        context: mean positions of its sequences.
        expert_bytes: of the experts that the CPU read, counted; of a step shortly before too.
    """

    seconds: float
    jobs: float
    busy: float
    wait: float
    tokens: int
    context: float
    expert_bytes: int = 0


class Unobserved:
    """Nobody looks."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def step(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


class EngineTimer:
    """Drives an engine over a runner.

    Args:
        runner: with the pages of the ``Load``.
        seed: seed of the prompts.
        engine: that is bound to the runner and has no thread; None: one is made, and no other one
            may be bound to the runner.
        overlap, target_itl_ms: of the engine that is made. Steps can be observed only without
            overlap.
        config: of that engine, in place of these.

    Raises:
        PykernelsError: a kernel that cannot run here.
    """

    def __init__(
        self,
        runner: PagedRunner,
        seed: int = 0,
        engine: Engine | None = None,
        overlap: bool = True,
        target_itl_ms: float | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.runner = runner
        self._watched = _Watched(runner)
        if engine is None:
            config = config or EngineConfig(overlap=overlap, target_itl_ms=target_itl_ms)
            engine = Engine(self._watched, threaded=False, config=config)
        self.engine = engine
        self._random = np.random.default_rng(seed)

    def prefill(self, tokens: int, observer: Observer | None = None) -> float:
        """Seconds until the first token of one prompt."""
        handle = self._submit(tokens, 1)
        with observer or Unobserved():
            start = time.perf_counter()
            self._until_drawn([handle], observer)
            return time.perf_counter() - start

    def decode(
        self,
        batch: int,
        context: int,
        tokens: int,
        observer: Observer | None = None,
        filled: bool = False,
    ) -> list[StepTime]:
        """Steps of ``batch`` sequences whose caches hold ``context`` tokens at the first.

        Before each one that is observed runs one that is not: what the observer does between two
        steps has put the workers to sleep.

        Args:
            filled: see ``Load``.
        """
        read = min(context, PAGE) if filled else context
        chunks = _chunks(batch, read, self.runner.max_num_batched_tokens)
        ahead = 0 if observer is None else 1
        most = (1 + ahead) * tokens + chunks + 1
        handles = [self._submit(context, most, filled) for _ in range(batch)]
        self._until_drawn(handles)
        self._watched.look_next()  # the last one that was looked at had prompts
        steps = []
        with observer or Unobserved():
            for _ in range(tokens):
                for _ in range(ahead):
                    self._step(handles, None)
                steps.append(self._step(handles, observer))
        for handle in handles:
            handle.cancel()
        self.engine.step()  # which does what was asked for
        return steps

    def close(self) -> None:
        """Ends the engine; the runner stays."""
        self.engine.close()

    def _submit(self, context: int, tokens: int, filled: bool = False) -> RequestHandle:
        prompt = self._random.integers(0, self.runner.vocab_size, context).tolist()
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True, seed=1)
        if filled:
            fill_context(self.runner, self.engine.cache, prompt)
        return self.engine.submit(prompt, params)

    def _until_drawn(self, handles: list[RequestHandle], observer: Observer | None = None) -> None:
        requests = [handle.requests[0] for handle in handles]
        around = (observer or Unobserved()).step
        while not all(request.num_output_tokens for request in requests):
            with around():
                self.engine.step()
            for request in requests:
                if request.error is not None:
                    raise request.error

    def _step(self, handles: list[RequestHandle], observer: Observer | None) -> StepTime:
        requests = [handle.requests[0] for handle in handles]
        before = sum(request.num_output_tokens for request in requests)
        with (observer or Unobserved()).step():
            start = time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - start
        for request in requests:
            if request.error is not None:
                raise request.error
        drawn = sum(request.num_output_tokens for request in requests) - before
        context = sum(request.computed for request in requests) / len(requests)
        if not self.engine.config.overlap:
            self._watched.look()
        jobs, half = min(self._watched.jobs_seconds(), seconds), self._watched.times
        busy = jobs * self._watched.busy_share
        wait = sum(half.waits) / len(half.waits) if half.waits else 0.0
        nbytes = self._watched.expert_bytes
        return StepTime(seconds, jobs, busy, wait, drawn, context, nbytes)


class _Watched:
    """A runner whose steps are looked at when they have ended.

    Attributes:
        times: of the last step that was looked at, one in ``_EVERY``: the next one waits meanwhile.
        busy_share: of that step's jobs, in which workers had something to do.
        expert_bytes: bytes of experts that the CPU read in that step.
    """

    def __init__(self, runner: PagedRunner) -> None:
        self._runner = runner
        self._count = 0
        self.times, self.busy_share, self.expert_bytes = BusyTimes(0.0, ()), 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def result(self) -> StepResult:
        """The runner's."""
        step_result = self._runner.result()
        if self._count % _EVERY == 0:
            self.look()
        self._count += 1
        return step_result

    def look_next(self) -> None:
        """The next step that ends is looked at."""
        self._count = 0

    def look(self) -> None:
        """Takes the figures of the step that ended last."""
        if (half := self._last_half()) is not None:
            assert half.ended is not None
            self.times, self.expert_bytes = BusyTimes.of(half.ended.jobs.jobs), half.expert_bytes
            self.busy_share = min(1.0, self.times.busy / max(half.ended.seconds, 1e-9))

    def jobs_seconds(self) -> float:
        """Seconds of the jobs of the step that ended last; of one that has none, 0."""
        half = self._last_half()
        return 0.0 if half is None or half.ended is None else half.ended.seconds

    def _last_half(self) -> CpuExecutable | None:
        """The CPU's part of the step that ended last."""
        steps = [*self._runner.steps, *self._runner.decode_steps]
        halves = [s if isinstance(s, CpuExecutable) else getattr(s, "cpu", None) for s in steps]
        ended = [(half.ended.ended, half) for half in halves if half is not None and half.ended]
        return max(ended, key=lambda pair: pair[0])[1] if ended else None


@dataclass(frozen=True)
class DecodeSpeed:
    """Medians of decode steps. Rates use 1e9 bytes.

    ``bytes_per_step`` are the weights that a step reads, of the experts those that its tokens took,
    and the keys and values at the mean context; with a GPU, the weights that the CPU reads.
    ``bytes_per_token`` is that over the batch, ``roof_share`` how near ``gbps`` comes to what the
    same threads read in a plain loop. ``us_per_layer`` is what a step takes beyond its bytes at
    that rate, over the layers; ``python_us_per_step`` what it takes beyond its jobs. ``cpu_busy``
    is the share of the step in which workers had something to do, ``wait_us_per_layer`` how long
    they waited for the GPU.
    """

    decode_tok_s: float
    us_per_step: float
    us_p10: float
    us_p90: float
    bytes_per_step: int
    bytes_per_token: int
    gbps: float
    roof_gbps: float
    roof_share: float
    us_per_layer: float
    python_us_per_step: float
    cpu_busy: float
    wait_us_per_layer: float


def decode_speed(
    steps: list[StepTime], program: Program, batch: int, layers: int, roof_gbps: float
) -> DecodeSpeed:
    """What the times of decode steps say.

    Args:
        program: program of a decode step.
        roof_gbps: read rate of the same threads, measured in the same run.

    Raises:
        PykernelsError: a step that drew fewer tokens than it has sequences: the cache was short.
    """
    if any(step.tokens != batch for step in steps):
        raise PykernelsError(
            "a decode step left sequences out", "Give the runner more pages, or a smaller --batch"
        )
    seconds = median(step.seconds for step in steps)
    p10, p90 = np.quantile([step.seconds for step in steps], [0.1, 0.9])
    context = median(step.context for step in steps)
    on_gpu = any(node.device.startswith("cuda") for node in program.nodes)
    nbytes = weight_bytes(program, 0, "cpu" if on_gpu else None)  # no tokens take no experts
    nbytes += round(median(step.expert_bytes for step in steps))
    if not on_gpu:
        nbytes += batch * cache_bytes(program, round(context))
    gbps = nbytes / seconds / 1e9
    return DecodeSpeed(
        decode_tok_s=round(batch / seconds, 2),
        us_per_step=round(1e6 * seconds, 1),
        us_p10=round(1e6 * float(p10), 1),
        us_p90=round(1e6 * float(p90), 1),
        bytes_per_step=nbytes,
        bytes_per_token=nbytes // batch,
        gbps=round(gbps, 4),
        roof_gbps=round(roof_gbps, 4),
        roof_share=round(gbps / roof_gbps, 4),
        us_per_layer=round(1e6 * (seconds - nbytes / roof_gbps / 1e9) / layers, 1),
        python_us_per_step=round(1e6 * median(step.seconds - step.jobs for step in steps), 1),
        cpu_busy=round(median(step.busy / step.seconds for step in steps), 4),
        wait_us_per_layer=round(1e6 * median(step.wait for step in steps), 1),
    )
