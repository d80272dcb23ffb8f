"""python -m bench.gpu.tune: times candidate launch plans on this GPU and writes the best ones.

They go to ``<cache folder>/gpu-plans.json``, which ``pykernels.gpu.plan_file`` reads. Candidates
are compiled by many processes (one core each) before anything is timed: compiling is most of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.ahead import only_compile
from pykernels.gpu.experts_plan import most_few
from pykernels.gpu.linear import linear
from pykernels.gpu.linear_plan import H200_PROCESSORS, Plan, kernel_of
from pykernels.gpu.many_rows_hopper import EXPERT_KINDS
from pykernels.gpu.many_rows_hopper import KINDS as MANY_KINDS
from pykernels.gpu.matrices import empty_for_gpu, kind_of
from pykernels.gpu.moe import Experts, down, gate_up, sort_slots
from pykernels.gpu.plan_file import EXPERTS_PLANS, write_tuned
from pykernels.gpu.plan_types import GemmPlan, ManyPlan

from .candidates import candidates
from .harness import reason, sets_for
from .machine import check_gpu
from .moe import INTER, TOPK, E, H, route
from .timer import make_timer
from .weights import format_of, random_experts, random_stack

LAYER = ("gate_up", "down", *EXPERTS_PLANS)


@dataclass(frozen=True)
class Job:
    """One line of the file: an operation on matrices [N, K] of a format at so many rows each."""

    op: str
    format: str
    activations: str
    rows: int
    N: int = INTER
    K: int = H

    @property
    def path(self) -> str:
        if self.activations == "fp8":
            return "fp8"
        return kind_of(format_of(self.format))

    @property
    def tokens(self) -> int:
        """T of a layer whose experts get ``rows`` rows each."""
        return max(1, self.rows * E // TOPK)

    def candidates(self) -> list[Plan]:
        return list(candidates(self.op, self.path, self.rows))


def jobs(ops: set[str], formats: set[str]) -> Iterator[Job]:
    """What is tuned: DeepSeek-V3's layer and linears, at the rows that the table parts."""
    layer = [("bf16", "bf16", r) for r in (1, 64, 128, 512)]
    layer += [("fp8", "fp8", r) for r in (64, 128, 512)]
    layer += [("int4-g128", "bf16", r) for r in (1, 64, 256)] + [("q4_k", "bf16", 1)]
    for format, activations, rows in layer:
        if format in formats:
            for op, N, K in (("gate_up", INTER, H), ("down", H, INTER)):
                if op in ops:
                    if activations == "bf16" and rows <= _few_rows(format):
                        op = f"few_{op}"
                    yield Job(op, format, activations, rows, N, K)
    linears = [(f, M) for f in ("int4-g128", "int8-channel") for M in (1, 16, 64, 256, 2048)]
    for format, M in [*linears, ("bf16", 64), ("fp8", 1), ("q4_k", 1), ("q4_k", 16)]:
        for N, K in ((7168, 7168), (18432, 7168)):
            if "linear" in ops and format in formats:
                yield Job(_linear_op(kind_of(format_of(format)), M, N, K), format, "bf16", M, N, K)


def _few_rows(format: str) -> int:
    """Most rows an expert for ``few_experts`` on Hopper, which decodes."""
    stack = empty_for_gpu(format_of(format), 1, INTER, H, torch.device("meta"))
    if stack.kind == "bf16":
        return 0
    return most_few(stack.kind, stack.group, stack.kind in EXPERT_KINDS)


def _linear_op(kind: str, M: int, N: int, K: int) -> str:
    """Which kind of plan ``linear_plan`` looks for on Hopper."""
    return kernel_of(kind, M, N, K, H200_PROCESSORS, (9, 0), kind in MANY_KINDS)


def calls(
    job: Job, device: torch.device, experts: Experts | None
) -> tuple[Callable[[Any], object], int]:
    """(a call that takes a plan, input sets it rotates over). On "meta" nothing is computed."""
    if experts is not None:
        T = job.tokens
        x = torch.randn(T, H, device=device).bfloat16()
        ids = torch.empty(T, TOPK, dtype=torch.int64, device=device)
        if device.type != "meta":
            ids = route(T, E, TOPK, "balanced", device)
        order = sort_slots(ids, E)
        how = job.activations
        if job.op.endswith("gate_up"):
            return lambda plan: gate_up(x, experts, order, activations=how, plan=plan), 1
        h = torch.randn(T * TOPK, INTER, device=device).bfloat16()
        return lambda plan: down(h, experts, order, activations=how, plan=plan), 1
    stacks = [random_stack(job.format, 1, job.N, job.K, device)]
    if device.type != "meta":  # together larger than L2
        more = sets_for(stacks[0].nbytes, device) - 1
        stacks += [random_stack(job.format, 1, job.N, job.K, device) for _ in range(more)]
    x = torch.randn(job.rows, job.K, device=device).bfloat16()
    turn = itertools.cycle(stacks)
    return lambda plan: linear(x, next(turn), plan=plan), len(stacks)


def compile_one(job: Job, plan: Plan) -> str | None:
    """Fills Triton's cache on disk, in a process of its own; the reason if it does not compile."""
    only_compile(torch.cuda.get_device_capability())
    return call_on_meta(job, plan)


def call_on_meta(job: Job, plan: Plan) -> str | None:
    """The launches of a job, on tensors without values; the reason if one fails."""
    meta = torch.device("meta")
    try:
        layer = job.op in LAYER
        experts = Experts.empty(format_of(job.format), E, H, INTER, meta) if layer else None
        calls(job, meta, experts)[0](plan)
    except Exception as error:
        return reason(error)
    return None


def distinct(wanted: list[Job]) -> list[tuple[Job, Plan]]:
    """One (job, plan) for each kernel: sizes and split_k are run-time numbers."""
    found: dict[object, tuple[Job, Plan]] = {}
    for job in wanted:
        for plan in job.candidates():
            if isinstance(plan, GemmPlan):
                plan = replace(plan, split_k=1)
            elif isinstance(plan, ManyPlan):
                plan = replace(plan, split_k=min(plan.split_k, 2))  # parts are float32
            key = (job.op, job.format, job.activations, job.rows == 1, plan)
            found.setdefault(key, (job, plan))
    return list(found.values())


def compile_all(wanted: list[Job]) -> None:
    """All candidates, on every core but one."""
    pairs = distinct(wanted)
    workers = max(1, min(16, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for (job, plan), why in zip(
            pairs, pool.map(compile_one, *zip(*pairs, strict=True)), strict=True
        ):
            if why:
                print(f"note: {job} {plan}: {why}", file=sys.stderr)


def time_one(job: Job, device: torch.device, experts: Experts | None) -> list[tuple[float, Plan]]:
    """(microseconds, plan) of every candidate that runs, fastest first."""
    call, sets = calls(job, device, experts)
    timer, found = make_timer(device), []
    for plan in job.candidates():
        try:
            ready = timer.prepare(functools.partial(call, plan), sets, 0.02)
            found.append((1e6 * median(ready() for _ in range(min(ready.rounds, 7))), plan))
        except Exception as error:
            print(f"note: {job} {plan}: {reason(error)}", file=sys.stderr)
            timer.check()
    return sorted(found, key=lambda pair: pair[0])


def tune(wanted: list[Job], device: torch.device, save: bool = True) -> Iterator[dict[str, object]]:
    """A row a job: the shipped plan's time and the three fastest; the fastest is written."""
    name = torch.cuda.get_device_name(device)
    compile_all(wanted)
    experts, made = None, ""
    for job in wanted:
        layer = job.op in LAYER
        if layer and made != job.format:
            experts = None  # before the next ones are made
            experts, made = random_experts(job.format, E, H, INTER, device), job.format
        elif not layer:
            experts, made = None, ""
        best = time_one(job, device, experts)
        row = {**asdict(job), "tried": len(job.candidates()), "ran": len(best)}
        if best and save:
            write_tuned(name, job.op, job.path, job.rows, job.N, job.K, best[0][1])
        for place, (us, plan) in enumerate(best[:4]):
            row |= {f"us_{place}": round(us, 1), f"plan_{place}": str(plan)}
        yield row


OPS = "gate_up,down,linear"
FORMATS = "bf16,fp8,int4-g128,int8-channel,q4_k"


def asked(op: str, format: str, rows: str) -> list[Job]:
    """The jobs that the options name; ``rows`` "" for any.

    Raises:
        PykernelsError: a name or a number of rows that nothing is tuned for.
    """
    for given, known, what in ((op, OPS, "op"), (format, FORMATS, "format")):
        if unknown := [name for name in given.split(",") if name not in known.split(",")]:
            raise PykernelsError(
                f"nothing is tuned for the {what} {unknown[0]!r}", f"Use {known}, or some of them"
            )
    found = list(jobs(set(op.split(",")), set(format.split(","))))
    if rows:
        names = set(rows.split(","))
        tuned = sorted({job.rows for job in found})
        if unknown := sorted(names - set(map(str, tuned))):
            raise PykernelsError(
                f"nothing is tuned for {unknown[0]!r} rows",
                f"Use some of {', '.join(map(str, tuned))}",
            )
        found = [job for job in found if str(job.rows) in names]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.tune", description=__doc__)
    parser.add_argument("--op", default=OPS, metavar="A,B")
    parser.add_argument("--format", default=FORMATS, metavar="A,B")
    parser.add_argument("--rows", default="", metavar="M,N", help="only jobs of so many rows")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--no-save", action="store_true", help="only print")
    chosen = parser.parse_args(arguments)
    wanted = asked(chosen.op, chosen.format, chosen.rows)
    if not torch.cuda.is_available():
        raise PykernelsError("there is no CUDA GPU here", "Run it on the GPU that is to be tuned")
    for row in tune(wanted, check_gpu(chosen.device), not chosen.no_save):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
