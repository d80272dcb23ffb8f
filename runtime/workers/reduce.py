"""The nodes' partial results, added in the order of the nodes (the reduction of SOSP'25 3.3).

A program's next norm adds them (``passes.numa``); this is for calls from outside a program.
"""

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

from .job import Job

REDUCE, _reduce_at = descriptor(
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
_CHUNK = 1 << 14


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


class Reduction:
    """The job ``y = sum of parts``: float32, rounded once; the parts in their order, so the bits do
    not depend on the threads.

    Args:
        after: as of ``Job``.
    """

    def __init__(self, after: Sequence[int]) -> None:
        self._record = np.zeros(1, REDUCE)
        self._record["chunk"] = _CHUNK
        self.job = Job("add parts", make_add_parts().address, self._record.ctypes.data, after=after)

    def arrange(self, parts: Sequence[torch.Tensor], y: torch.Tensor) -> None:
        """Writes a call; the caller keeps parts and y until it has ended.

        Args:
            parts: float32, contiguous, of y's shape; the first one is overwritten.
            y: bf16 or float32, contiguous.
        """
        self._addresses = np.array([part.data_ptr() for part in parts], np.int64)
        record = self._record
        record["values"], record["y"] = y.numel(), y.data_ptr()
        record["y_bf16"] = y.dtype == torch.bfloat16
        record["parts"], record["count"] = self._addresses.ctypes.data, len(parts)
        self.job.tasks = -(-y.numel() // _CHUNK)
