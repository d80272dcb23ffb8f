"""The nodes' partial results, added in the order of the nodes (the reduction of SOSP'25 3.3)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, types

from pykernels.cpu.intrin.descriptor import descriptor
from pykernels.cpu.intrin.scalar import round_bf16
from pykernels.cpu.intrin.sync import as_pointer
from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError

from .worker_pool import Call, WorkerPool

_, _reduce_at = descriptor(
    "reduce",
    (
        "values",  # of one part
        "chunk",  # of them in one task
        "parts",  # address of int64 [count]: where each float32 part begins
        "count",
        "y",
        "y_bf16",  # 1: y is bf16, 0: float32
        "added",  # address of int64 [tasks]: 1 where a task is done
    ),
)
_CHUNK = 1 << 16
_SERIAL = 1 << 17
"""Values up to which waking the workers costs more than it saves."""


@functools.cache
def make_add_parts() -> Any:
    """Compiles (or loads) the task ``y = part 0 + part 1 + ...``, one run of values each."""

    @task("add-parts")
    def add_parts(job_address, index, worker):  # type: ignore[no-untyped-def]
        job = _reduce_at(job_address)
        addresses = carray(as_pointer(job.parts), (job.count,), types.int64)
        added = carray(as_pointer(job.added), (index + 1,), types.int64)
        if added[index] != 0:
            return 0
        first, last = index * job.chunk, min((index + 1) * job.chunk, job.values)
        total = carray(as_pointer(addresses[0]), (last,), types.float32)
        for p in range(1, job.count):
            part = carray(as_pointer(addresses[p]), (last,), types.float32)
            for i in range(first, last):
                total[i] += part[i]
        if job.y_bf16 != 0:
            halves = carray(as_pointer(job.y), (last,), types.uint16)
            for i in range(first, last):
                halves[i] = round_bf16(total[i])
        else:
            floats = carray(as_pointer(job.y), (last,), types.float32)
            for i in range(first, last):
                floats[i] = total[i]
        added[index] = 1
        return 0

    return add_parts


def nothing_added(y: torch.Tensor) -> np.ndarray:
    """``reduce``'s ``added`` where no task is done."""
    return np.zeros(-(-y.numel() // _CHUNK), np.int64)


def reduce(
    parts: Sequence[torch.Tensor],
    y: torch.Tensor,
    pool: WorkerPool,
    added: np.ndarray | None = None,
) -> None:
    """``y = sum of parts``, on this thread or, if it is long, on a pool that has nothing to do.

    float32, rounded once; parts in their order, so the bits do not depend on the threads.

    Args:
        parts: float32, contiguous, of y's shape; the first one is overwritten.
        y: bf16 or float32, contiguous.
        added: which tasks are done. After Ctrl-C, give it again to go on: parts must not be added
            to the first one twice.
    """
    added = nothing_added(y) if added is None else added
    values, bf16 = y.numel(), y.dtype == torch.bfloat16
    addresses = np.array([part.data_ptr() for part in parts], np.int64)
    at = addresses.ctypes.data, len(parts), y.data_ptr(), bf16, added.ctypes.data
    job = np.array([values, _CHUNK, *at], np.int64)
    add_parts, tasks = make_add_parts(), -(-values // _CHUNK)
    if values > _SERIAL:
        # A pool that was closed, or runs another thread's call, refuses: then this thread does it.
        with contextlib.suppress(PykernelsError):
            return pool.run(Call(add_parts.address, 0, job.ctypes.data, tasks, 1, 0))
    for index in range(tasks):
        add_parts.ctypes(job.ctypes.data, index, 0)
