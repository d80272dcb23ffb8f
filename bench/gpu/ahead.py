"""Every case once, in many processes, before any is timed: compiling is most of a first run.

What a process compiles stays in the caches on disk (Triton's, Inductor's, FlashInfer's), where the
one that measures finds it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import torch

PROCESSES = {"router": 2, "around": 2, "linear": 3, "moe": 2, "attention": 6}
"""By how long an op's kernels take to compile; two layers of bf16 experts are 45 GB already."""


def call_some(op: str, share: int, shares: int, device: str, quick: bool) -> int:
    """Calls case ``share`` of each ``shares``, and its peers; how many calls came back.

    One that fails is of no interest here: it will fail again, and be a row, when it is timed.
    """
    from .machine import check_gpu
    from .run import module_of

    place, done = check_gpu(device), 0
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


def compile_ahead(ops: Iterable[str], device: str, quick: bool) -> int:
    """Calls every case of ``ops``, on as many cores as there are; how many calls came back."""
    tasks = [(op, i, PROCESSES[op], device, quick) for op in ops for i in range(PROCESSES[op])]
    workers = max(1, min(len(tasks), (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    done = 0
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in [pool.submit(call_some, *task) for task in tasks]:
            try:
                done += future.result()
            except Exception:  # its process died: what it had left is compiled when it is timed
                continue
    return done
