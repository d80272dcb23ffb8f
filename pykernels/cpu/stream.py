"""Reading memory and doing nothing else: what the expert kernels' bandwidth is measured against."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from .intrin.descriptor import descriptor
from .intrin.prefetch import prefetch_l1, prefetch_l2
from .intrin.sync import as_pointer
from .jit import inlined, task

STREAM, _stream_at = descriptor("stream", ("base", "bytes", "sink"))
"""Job of a read: task ``i`` reads ``bytes`` (a multiple of 1024) at ``base + i * bytes`` and writes
their sum as int64 words to element ``i`` at ``sink``."""

AHEAD = 4096
"""Bytes that a prefetching loop asks ahead: one page."""


@inlined
def _no_prefetch(address):
    pass


LOOPS = {
    "hardware": (_no_prefetch, 1),
    "l1": (prefetch_l1, 1),
    "l2": (prefetch_l2, 1),
    "hardware, two streams": (_no_prefetch, 2),
    "l1, two streams": (prefetch_l1, 2),
}
"""The plain read loops: what they ask for ahead, and how many runs of a task's bytes they read side
by side. Which is fastest depends on the CPU."""


@functools.cache
def make_read(loop: str) -> Any:
    """Compiles the read task (``jit.TASK``) of one of ``LOOPS``."""
    ask, STREAMS = LOOPS[loop]

    @task(loop)
    def read(job_address, index, worker):
        job = _stream_at(job_address)
        base = job.base + index * job.bytes
        run = job.bytes // STREAMS
        total = types.int64(0)
        for at in range(0, run, 512):
            for stream in range(STREAMS):
                block = base + stream * run + at
                for line in range(8):
                    ask(block + 64 * line + AHEAD)
                words = carray(as_pointer(block), (64,), types.int64)
                for i in range(64):
                    total += words[i]
        carray(as_pointer(job.sink), (index + 1,), types.int64)[index] = total
        return 0

    return read
