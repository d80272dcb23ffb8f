"""The nodes' partial results, added in the order of the nodes (the reduction of SOSP'25 3.3)."""

from __future__ import annotations

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

from .job import Job, Jobs
from .worker_pool import WorkerPool

_, _reduce_at = descriptor(
    "reduce",
    (
        "values",  # of one part
        "chunk",  # of them in one task
        "parts",  # address of int64 [count]: where each float32 part begins
        "count",
        "y",
        "y_bf16",  # 1: y is bf16, 0: float32
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
        return 0

    return add_parts


def reduce(parts: Sequence[torch.Tensor], y: torch.Tensor, pool: WorkerPool) -> None:
    """``y = sum of parts``, on this thread or, if it is long, on a pool.

    float32, rounded once; parts in their order, so the bits do not depend on the threads.

    Args:
        parts: float32, contiguous, of y's shape; the first one is overwritten.
        y: bf16 or float32, contiguous.
    """
    values, bf16 = y.numel(), y.dtype == torch.bfloat16
    addresses = np.array([part.data_ptr() for part in parts], np.int64)
    at = addresses.ctypes.data, len(parts), y.data_ptr(), bf16
    record = np.array([values, _CHUNK, *at], np.int64)
    add_parts, tasks = make_add_parts(), -(-values // _CHUNK)
    if values > _SERIAL and not pool.closed:  # as it may be by now
        job = Job("add parts", add_parts.address, record.ctypes.data, tasks=tasks, after=0)
        return pool.run(Jobs([job]))
    for index in range(tasks):
        add_parts.ctypes(record.ctypes.data, index, 0)
    return None
