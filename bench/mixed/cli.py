"""`pykernels bench mixed`: a prompt that arrives while other sequences decode.

What the streams wait from token to token meanwhile, and the prompt for its first one, once without
a cap and once with ``target_itl_ms``, each on an engine of its own over the same weights.
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.cli.shared.common import Debug, command, err
from model.cli.shared.execution import settled
from model.cli.shared.options import Choose
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..e2e.cli import check_gpu, described, open_model
from ..e2e.model_options import HOW_EXPERTS, ModelOptions, count
from ..harness.keeping.kept import AsJson, Save, keeping

if TYPE_CHECKING:
    from bench.harness.timing.rows import Row
    from runtime.engine import Engine

    from ..e2e.ours import Ours

ALONE = 48
"""Tokens of each stream before the prompt arrives, which are timed too."""
WARM = 8
"""Tokens of each before those."""


@command
def mixed(
    chosen: Annotated[ModelOptions, Choose(but=("activations",))],
    execution: Annotated[ExecutionConfig, HOW_EXPERTS],
    streams: Annotated[int, count("Sequences that decode.")] = 4,
    context: Annotated[int, count("Tokens in each one's cache before.")] = 128,
    prompt: Annotated[int, count("Tokens of the prompt that arrives.")] = 1024,
    target_itl_ms: Annotated[
        float, typer.Option(metavar="MS", help="Of the engine with a cap.")
    ] = 100.0,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the streams of sequences that decode while a prompt is read, and that prompt.

    Milliseconds from token to token of all streams: before the prompt, and from its arrival to its
    first token; of the prompt the time to that.
    """
    chosen.check()
    check_gpu(execution)
    execution = settled(execution)
    from .table import NAMED

    caps: list[float | None] = [None, target_itl_ms]
    with keeping("mixed", save, as_json) as kept, err().status("", spinner_style="dim") as status:
        status.update(chosen.doing)
        ours = open_model(chosen, execution, settings="--context or --prompt")
        try:
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "threads": ours.pool.threads,
                **described(execution),
                "streams": streams,
                "context": context,
                "prompt": prompt,
            }
            kept.plan = [{NAMED: cap or ""} for cap in caps]
            for cap in caps:
                status.update(f"compiling, timing {f'with {cap:g} ms' if cap else 'no cap'} …")
                load = streams, context, prompt
                kept.add({NAMED: cap or ""} | measured(ours, execution, *load, cap))
        finally:
            ours.close()


def measured(
    ours: Ours,
    execution: ExecutionConfig,
    streams: int,
    context: int,
    prompt: int,
    target_itl_ms: float | None,
) -> Row:
    """The figures of one engine.

    Raises:
        PykernelsError: more positions than the model has; a stream ended before the prompt's first
            token.
    """
    from runtime.engine.scheduling.prefill_cap import PREFILL_CAP_FLOOR
    from runtime.profiling.engine_speed import Load

    most = WARM + ALONE + 2 * (-(-prompt // PREFILL_CAP_FLOOR)) + 64
    load = Load(prompt, most, streams + 1, context)
    timer = ours.timer(load, execution, target_itl_ms=target_itl_ms)
    try:
        timer.prefill(prompt)  # compiles what long prompts need
        timer.decode(streams, min(context, 64), 4)
        alone_s = timer.prefill(prompt)
        timer.engine.threaded = True  # from here on clients drive it
        run = _Run(timer.engine, timer.runner.vocab_size, most)
        try:
            asyncio.run(run.all(streams, context, prompt))
        except ExceptionGroup as group:  # all streams end for one reason
            raise group.exceptions[0] from None
    finally:
        timer.close()
    row: Row = {}
    for name, gaps in (("alone", run.gaps(before=True)), ("mixed", run.gaps(before=False))):
        if len(gaps) < 2:
            raise PykernelsError(
                "the prompt had its first token before a stream had two others",
                "Give a longer --prompt",
            )
        p50, p99 = quantiles(gaps, n=100, method="inclusive")[49::49]
        figures = {"p50": p50, "p99": p99, "max": max(gaps)}
        row |= {f"itl_{name}_{key}_ms": round(1e3 * value, 2) for key, value in figures.items()}
        row[f"itl_{name}_count"] = len(gaps)
    return row | {"ttft_s": round(run.first - run.arrived, 4), "ttft_alone_s": round(alone_s, 4)}


class _Run:
    """Streams and a prompt on one engine, as its clients see them; seconds of one clock.

    Attributes:
        arrived, first: when the prompt was submitted, and had its first token.
    """

    def __init__(self, engine: Engine, vocab_size: int, most: int) -> None:
        self.engine, self._most = engine, most
        self._random, self._vocab = random.Random(1), vocab_size
        self._times: list[list[float]] = []
        self.arrived = self.first = 0.0
        self._begin = self._over = asyncio.Event()

    async def all(self, streams: int, context: int, prompt: int) -> None:
        """Streams, then the prompt beside them, to its first token."""
        self._times = [[] for _ in range(streams)]
        self._over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for times in self._times:
                group.create_task(self._stream(context, times))
            while min(map(len, self._times)) < WARM + ALONE:
                await asyncio.sleep(0.002)
            self.arrived = time.perf_counter()
            async for _ in self.engine.astream(self._tokens(prompt), self._params(1)):
                break
            self.first = time.perf_counter()
            self._over.set()

    async def _stream(self, context: int, times: list[float]) -> None:
        async for _ in self.engine.astream(self._tokens(context), self._params(self._most)):
            times.append(time.perf_counter())
            if self._over.is_set():
                return
        raise PykernelsError(
            "a stream ended before the prompt's first token", "Give a shorter --prompt"
        )

    def gaps(self, before: bool) -> list[float]:
        """Seconds between the tokens of each stream, of all of them: those that came before the
        prompt, or until its first token."""
        span = (0.0, self.arrived) if before else (self.arrived, self.first)
        return [
            after - at
            for times in self._times
            for at, after in zip(times[WARM:], times[WARM + 1 :], strict=False)
            if span[0] < after <= span[1]
        ]

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab), k=count)

    def _params(self, tokens: int) -> Any:
        from runtime.engine import SamplingParams

        return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
