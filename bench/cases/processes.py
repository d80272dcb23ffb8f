"""Other processes of a run on a GPU: those that compile before anything is timed, and the one that
goes on where a case has ended the CUDA context.

Compiling is most of a first run. What a process compiles stays in the caches on disk (Triton's,
Inductor's, FlashInfer's), where the one that measures finds it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import torch

from bench.harness.machine import check_gpu
from bench.harness.timing.measure import quick_collections
from bench.harness.timing.rows import Row
from bench.peers.catalog import ROOT

from .gpu_run import GoOn, module_of

PROCESSES = {
    "attention": 6,
    "linear": 3,
    "moe": 2,
    "router": 2,
    "delta_net": 2,
    "small_ops": 2,
    "unpack_tiles": 1,
}
"""Processes at once: more where an op's kernels take long to compile. Two layers of bf16 experts
are 45 GB already."""


def call_some(op: str, share: int, shares: int, device: str, quick: bool) -> int:
    """Calls case ``share`` of each ``shares``, and its peers; how many calls came back.

    One that fails is of no interest here: it will fail again, and be a row, when it is timed.
    """
    place, done = check_gpu(device), 0
    with quick_collections():
        for i, case in enumerate(module_of(op).cases(place, quick)):
            if i % shares == share:
                for call in (case.run, *case.peers.values()):
                    try:
                        call()
                        done += 1
                    except Exception:
                        continue
            del case
            gc.collect()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
                torch.cuda.empty_cache()
    return done


def _call_all(tasks: list[tuple[str, int, int, str, bool]]) -> None:
    for task in tasks:
        call_some(*task)


def compile_ahead(
    ops: Iterable[str], device: str, quick: bool, seconds: float | None = None
) -> tuple[int, int]:
    """Calls every case of ``ops``, on as many cores as there are, for ``seconds`` at most.

    What is not compiled by then is compiled when it is timed.

    Returns:
        The processes that have called all of theirs, and all processes.
    """
    tasks = [(op, i, PROCESSES[op], device, quick) for op in ops for i in range(PROCESSES[op])]
    count = max(1, min(len(tasks), (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_call_all, args=(tasks[i::count],)) for i in range(count)]
    until = None if seconds is None else time.monotonic() + seconds
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(None if until is None else max(0.0, until - time.monotonic()))
        return sum(worker.exitcode == 0 for worker in workers), count
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


def in_a_new_process(ops: tuple[str, ...], options: list[str], until: float | None) -> GoOn:
    """This program again, for what is left."""

    def again(count: int) -> Iterator[Row]:
        command = [sys.executable, "-m", "bench.gpu", "--op", ",".join(ops), "--skip", str(count)]
        command += ["--json", "--no-files", *options]
        if until is not None:
            command += ["--minutes", str(max(0.01, (until - time.monotonic()) / 60))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                row = _row(line)
                if row is None:
                    print(line, end="", file=sys.stderr)
                elif row["op"] != "roofs":
                    yield row
        if child.returncode not in (0, 1):
            yield {
                "op": ops[0],
                "name": "(the new process)",
                "why": f"it ended: {child.returncode}",
            }

    return again


def _row(line: str) -> Row | None:
    """A line of the new process; None for what a library of its printed."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "op" in row else None
