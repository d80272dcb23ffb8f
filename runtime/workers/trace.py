"""The spans of a ring's workers, read."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pykernels.errors import PykernelsError

from .job import Job, Jobs
from .spans import BEGIN, END, JOB, LINE, LOW, MASK, SPAN_BYTES, STRIDE, TASK

CAPACITY = 1 << 17
"""Spans of a worker between two calls of ``take``: 4 MiB of memory for each."""


@dataclass(frozen=True)
class TaskSpan:
    """One task, setup or wait of a worker; times in ns of the monotonic clock.

    Attributes:
        job: None of a wait that is for no job of its own (a barrier within a task, the next step).
        task: its index, ``SETUP`` or ``WAIT``.
    """

    worker: int
    job: Job | None
    task: int
    begin: int
    end: int


class WorkerTrace:
    """The memory of one ring's spans.

    Args:
        capacity: spans of each worker that are kept until ``take``; a power of two.

    Attributes:
        address: what the ring's word ``TRACE`` holds while spans are written.
    """

    def __init__(self, workers: int, capacity: int = CAPACITY) -> None:
        assert capacity & (capacity - 1) == 0, f"{capacity} is no power of two"
        self.workers, self.capacity = workers, capacity
        each = (LINE + SPAN_BYTES * capacity) // 8
        # Of ones, then of zeros: pages that are there already, so that no worker waits for them.
        self._memory = np.ones(LINE // 8 + workers * each, np.int64)
        self._memory[:] = 0
        self._memory[MASK // 8], self._memory[STRIDE // 8] = capacity - 1, 8 * each
        self._of = self._memory[LINE // 8 :].reshape(workers, each)
        self._taken = [0] * workers
        self._jobs: dict[int, Job] = {}
        self._published: list[tuple[int, Jobs]] = []

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    def published(self, jobs: Jobs) -> None:
        """Called before jobs are published: their names, and the time."""
        self._published.append((time.monotonic_ns(), jobs))

    def calls(self) -> list[tuple[int, Jobs]]:
        """When which jobs were published since the last call, ns of the monotonic clock."""
        calls, self._published = self._published, []
        for _, jobs in calls:
            self._jobs.update((job.address, job) for job in jobs.jobs)
        return calls

    def skip(self) -> None:
        """Forgets the spans since the last call."""
        self._taken = [int(memory[0]) for memory in self._of]

    def take(self) -> list[TaskSpan]:
        """The spans since the last call, each worker's in order; call ``calls`` first.

        Raises:
            PykernelsError: there were more of them than there is room for.
        """
        spans: list[TaskSpan] = []
        for worker, memory in enumerate(self._of):
            count, first = int(memory[0]), self._taken[worker]
            if count - first > self.capacity:
                self._taken[worker] = count
                raise PykernelsError(
                    f"worker {worker} ran {count - first} tasks, and {self.capacity} can be traced",
                    "Trace a smaller step: a shorter prompt, or fewer layers",
                )
            circle = memory[LINE // 8 :].reshape(self.capacity, SPAN_BYTES // 8)
            rows = circle[np.arange(first, count) & (self.capacity - 1)]
            tasks = (rows[:, TASK // 8] & LOW).astype(np.uint32).view(np.int32)
            for row, task in zip(rows.tolist(), tasks.tolist(), strict=True):
                job = self._jobs.get(row[JOB // 8])
                spans.append(TaskSpan(worker, job, task, row[BEGIN // 8], row[END // 8]))
            self._taken[worker] = count
        return spans
