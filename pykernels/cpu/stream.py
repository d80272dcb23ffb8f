"""Reading memory and doing nothing else: what the expert kernels' bandwidth is measured against."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types

from .intrin.avx512 import prefetch
from .intrin.sync import as_pointer
from .jit import task

STREAM = np.dtype(
    [("base", np.int64), ("bytes", np.int64), ("ahead", np.int64), ("sink", np.int64)]
)
"""Job of a read: task ``i`` reads ``bytes`` at ``base + i * bytes``, prefetching ``ahead`` bytes on
(0: leaves that to the hardware), and writes their sum to int64 element ``i`` at ``sink``."""


@functools.cache
def make_read() -> Any:
    """Compiles the read task (``jit.TASK``): one pass over ``bytes``, a multiple of 512."""

    @task()
    def read(job_address, index, worker):
        job = carray(as_pointer(job_address), (1,), STREAM)[0]
        base = job.base + index * job.bytes
        total = types.int64(0)
        if job.ahead > 0:
            for at in range(0, job.bytes, 512):
                for line in range(8):
                    prefetch(base + at + 64 * line + job.ahead)
                words = carray(as_pointer(base + at), (64,), types.int64)
                for i in range(64):
                    total += words[i]
        else:
            words = carray(as_pointer(base), (job.bytes // 8,), types.int64)
            for i in range(job.bytes // 8):
                total += words[i]
        carray(as_pointer(job.sink), (index + 1,), types.int64)[index] = total
        return 0

    return read
