"""Prompts of some lengths, with their experts on the CPU, streamed to the GPU, or as measured rates
say; how near a streamed one comes to what the link or the GPU takes alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.harness.timing.rows import attempt, reason
from runtime.devices.cuda.runner import CudaRunner
from runtime.devices.cuda.step.executable import CudaExecutable
from runtime.planning.config import PREFILL, ExecutionConfig
from runtime.profiling.engine_speed import EngineTimer, Load
from runtime.runner.paged_runner import Executable

from ..e2e.ours import Ours
from ..several_gpus.crossing import loaded_bytes

Row = dict[str, Any]
Step = Callable[[str], None]
"""Called before each part with its name."""
MODES = tuple(sorted(PREFILL, key=("cpu", "split", "stream", "auto").index))
_ROUNDS = 3


@dataclass(frozen=True)
class Crossing:
    """What of a prompt crosses the link.

    Attributes:
        steps: that it takes; ``streamed``: of them, those whose experts cross; ``nbytes``: in all
            of these.
    """

    steps: int
    streamed: int
    nbytes: int


def rows(
    ours: Ours,
    lengths: Sequence[int],
    execution: ExecutionConfig,
    budget: int | None = None,
    rounds: int = _ROUNDS,
    step: Step = lambda name: None,
) -> Iterator[Row]:
    """A row for each way and each length (``plan``); one that fails has ``why``.

    Args:
        execution: on a GPU with the experts on the CPU.
        budget: tokens of a step; None: as the device has it.
    """
    for mode in MODES:
        step(f"{mode}: compiling")
        load = Load(max(lengths), 2)
        try:
            timer = ours.timer(load, replace(execution, prefill=mode), budget)
        except Exception as error:
            if mode == MODES[0]:  # what the first one refuses the others do, too
                raise
            yield from ({**named, "why": reason(error)} for named in plan(lengths, [mode]))
            continue
        try:
            for named in plan(lengths, [mode]):
                step(f"{mode}: {named['tokens']} tokens")
                yield named | attempt(partial(_row, timer, named["tokens"], rounds))
        finally:
            timer.close()
            timer.runner.close()


def plan(lengths: Sequence[int], ways: Sequence[str] = MODES) -> list[Row]:
    """Lists, for each row, the columns that name it."""
    return [{"way": way, "tokens": tokens} for way in ways for tokens in lengths]


def _row(timer: EngineTimer, tokens: int, rounds: int) -> Row:
    timer.prefill(tokens)
    seconds = median(timer.prefill(tokens) for _ in range(rounds))
    return _figures(timer, tokens, seconds)


def _figures(timer: EngineTimer, tokens: int, seconds: float) -> Row:
    row: Row = {"tok_s": round(tokens / seconds, 1), "seconds": round(seconds, 5)}
    runner = timer.runner
    if not isinstance(runner, CudaRunner):
        return row
    streaming = runner.plan.streaming
    if streaming is None or not streaming.link_bytes_per_s:
        return row
    found = crossing(runner, tokens)
    row |= {"steps": found.steps, "streamed_steps": found.streamed, "link_bytes": found.nbytes}
    if not found.streamed:
        return row
    link_s = found.nbytes / streaming.link_bytes_per_s
    row |= {
        "link_gbps": round(found.nbytes / seconds / 1e9, 2),
        "link_roof_gbps": round(streaming.link_bytes_per_s / 1e9, 2),
        "link_share": round(link_s / seconds, 4),
    }
    only = step_of(runner, tokens) if found.steps == 1 else None
    if isinstance(only, CudaExecutable) and only.cpu is None and len(only.gpus) == 1:
        alone = gpu_seconds(only)
        row |= {"gpu_s": round(alone, 5), "overlap": round(overlap(seconds, link_s, alone), 4)}
    return row


def crossing(runner: CudaRunner, tokens: int) -> Crossing:
    """What of a prompt of so many tokens crosses."""
    whole, rest = divmod(tokens, runner.max_num_batched_tokens)
    chunks = [runner.max_num_batched_tokens] * whole + ([rest] if rest else [])
    sizes = [loaded_bytes(step_of(runner, chunk).program) for chunk in chunks]
    return Crossing(len(chunks), sum(map(bool, sizes)), sum(sizes))


def step_of(runner: CudaRunner, tokens: int) -> Executable:
    """Which program runs a step of so many tokens of one prompt."""
    steps = runner.decode_steps if tokens == 1 else runner.steps
    return next(step for step in steps if tokens <= step.program.sizes["T"])


def overlap(seconds: float, link_s: float, gpu_s: float) -> float:
    """Share of the shorter of link and GPU time that ran under the longer one."""
    return max(0.0, min(1.0, (link_s + gpu_s - seconds) / min(link_s, gpu_s)))


@torch.inference_mode()
def gpu_seconds(step: CudaExecutable) -> float:
    """Seconds of the launches of a step alone, on experts that crossed before: as its last run."""
    launches = step.without_copies()
    times = list[float]()
    with torch.cuda.device(step.memory.device):
        launches.run()
        torch.cuda.synchronize()
        launches.capture(torch.cuda.graph_pool_handle())
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            launches.run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return median(times[1:])
