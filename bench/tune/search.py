"""Candidates of launch plans compiled, timed, and the best of each job written.

Compiling is most of it, so it is done by many processes (one core each) before anything is timed.
Each plan is timed alone, then the fastest once more in turns: a GPU's clock depends on what ran
before.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import torch

from bench.harness.timing.rows import reason
from bench.harness.timing.timer import make_timer
from pykernels.gpu.common.precompile import only_compile

from .job import Job

_FINALISTS = 3
"""Plans that are timed in turns, and the shipped one with them."""


def compile_one(job: Job, plan: Any) -> str | None:
    """Fills Triton's cache on disk, in a process of its own; the reason if it does not compile."""
    only_compile(torch.cuda.get_device_capability())
    return call_on_meta(job, plan)


def call_on_meta(job: Job, plan: Any) -> str | None:
    """The launches of a job, on tensors without values; the reason if one fails."""
    try:
        job.calls(torch.device("meta"), {})[0](plan)
    except Exception as error:
        return reason(error)
    return None


def tried(job: Job, device: torch.device, capability: tuple[int, int]) -> list[Any]:
    """The shipped plan, where it is known, and the candidates; each once."""
    shipped = job.shipped(device)
    return list(dict.fromkeys([*([shipped] if shipped else []), *job.candidates(capability)]))


def distinct(wanted: Sequence[tuple[Job, list[Any]]]) -> list[tuple[Job, Any]]:
    """One (job, plan) for each kernel."""
    by_kernel: dict[object, tuple[Job, Any]] = {}
    for job, plans in wanted:
        for plan in plans:
            key, compiles = job.kernel(plan)
            by_kernel.setdefault(key, (job, compiles))
    return list(by_kernel.values())


def compile_all(wanted: Sequence[tuple[Job, list[Any]]]) -> None:
    """All plans of the jobs, on every core but one."""
    pairs = distinct(wanted)
    workers = max(1, min(16, (os.cpu_count() or 2) - 1, len(pairs)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for (job, plan), why in zip(
            pairs, pool.map(compile_one, *zip(*pairs, strict=True)), strict=True
        ):
            if why:
                print(f"note: {job} {plan}: {why}", file=sys.stderr)


def time_all(
    job: Job, call: Callable[[Any], object], sets: int, plans: list[Any], device: torch.device
) -> list[tuple[float, Any]]:
    """(microseconds, plan) of those that run, fastest first.

    The first plan and the fastest are timed in turns, and these times are in front.
    """
    timer, times, ready = make_timer(device), [], {}
    for plan in plans:
        try:
            made = timer.prepare(functools.partial(call, plan), sets, 0.02)
            times.append((1e6 * median(made() for _ in range(min(made.rounds, 7))), plan))
            ready[plan] = made
            best = sorted(times, key=lambda pair: pair[0])[:_FINALISTS]
            for loser in set(ready) - {plans[0], *(plan for _, plan in best)}:
                del ready[loser]  # a graph of many calls
        except Exception as error:
            print(f"note: {job} {plan}: {reason(error)}", file=sys.stderr)
            timer.check()
    turns = [{plan: made() for plan, made in ready.items()} for _ in range(9)]
    again = [(1e6 * median(turn[plan] for turn in turns), plan) for plan in ready]
    rest = [pair for pair in times if pair[1] not in ready]
    by_time = functools.partial(sorted, key=lambda pair: pair[0])
    return [*by_time(again), *by_time(rest)]


def tune(wanted: list[Job], device: torch.device, save: bool = True) -> Iterator[dict[str, object]]:
    """A row a job: the fastest four plans, and the shipped one with what the fastest gains.

    The fastest is written, or the shipped one unless that is slower by a hundredth.
    """
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else ""
    capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    plans = [(job, tried(job, device, capability)) for job in wanted]
    if cuda:
        compile_all(plans)
    kept: dict[str, Any] = {}
    for job, some in plans:
        times = time_all(job, *job.calls(device, kept), some, device)
        gc.collect()  # graphs, and inputs that their calls hold
        if cuda:
            torch.cuda.empty_cache()  # a capture cannot ask the allocator to give memory back
        row: dict[str, object] = {**job.params, "tried": len(some), "ran": len(times)}
        shipped = job.shipped(device)
        us = {plan: us for us, plan in times}
        if shipped in us:
            row |= {"us_shipped": round(us[shipped], 1), "shipped": str(shipped)}
            row["gain"] = round(us[shipped] / times[0][0], 3)
        if times and save:
            job.write(name, shipped if us.get(shipped, 1e9) < 1.01 * times[0][0] else times[0][1])
        for place, (time, plan) in enumerate(times[:4]):
            row |= {f"us_{place}": round(time, 1), f"plan_{place}": str(plan)}
        yield row
