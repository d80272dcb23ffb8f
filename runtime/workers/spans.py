"""How a worker of a ring writes down what it does when: spans, in memory of its own.

A ring's word ``TRACE`` holds the address of that memory, or 0: then a task costs one load and one
branch more than without all this. A span is four int64 words: the job's address, its number in the
ring with the task's index, begin and end in ns of the monotonic clock. A worker writes its spans in
a circle, and behind each one how many it has written, so a reader sees whole spans only.
"""

from __future__ import annotations

from pykernels.cpu.intrin.sync import atomic_load, atomic_store
from pykernels.cpu.jit import inlined

LINE = 64

# The head of the memory, then for each worker a line with its count, and its spans.
MASK, STRIDE = 0, 8
JOB, TASK, BEGIN, END = 0, 8, 16, 24
SPAN_BYTES = 32

SETUP, WAIT = -1, -2
"""Stand for a task's index: a job's setup; a wait for another job or within a task."""

LOW = 0xFFFFFFFF
"""The bits of the index in ``TASK``; the others are the job's number."""


@inlined
def record(trace, worker, job, number, task, begin, end):  # type: ignore[no-untyped-def]
    """Writes a span. Other threads may read meanwhile; no other one writes for this worker."""
    mine = trace + LINE + worker * atomic_load(trace + STRIDE)
    count = atomic_load(mine)
    at = mine + LINE + (count & atomic_load(trace + MASK)) * SPAN_BYTES
    atomic_store(at + JOB, job)
    atomic_store(at + TASK, (number << 32) | (task & LOW))
    atomic_store(at + BEGIN, begin)
    atomic_store(at + END, end)
    atomic_store(mine, count + 1)
