"""Jobs as Python makes them: a record in the ring's layout, and what tells of its failures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from . import ring as words


class Job:
    """One job's record in the ring's layout.

    Args:
        run, record: address of the task (``pykernels.cpu.jit.TASK``) and of what it reads.
        open: address of the task that counts the others; 0: always ``tasks``.
        after: how many jobs before it stands the one that must be complete; 0: none.
        describe: what the task of a number does, in words; None if the job's name says it.
    """

    def __init__(
        self,
        name: str,
        run: int,
        record: int,
        open: int = 0,
        tasks: int = 1,
        after: int = 1,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        self.name, self._describe = name, describe
        raw = np.zeros(words.JOB_BYTES // 8 + 8, np.int64)
        skip = -raw.ctypes.data % words.LINE // 8
        self.words = raw[skip : skip + words.JOB_BYTES // 8]
        for at, value in (
            (words.OPEN, open), (words.RUN, run), (words.RECORD, record), (words.AFTER, after),
            (words.TASKS, tasks),
        ):  # fmt: skip
            self.words[at // 8] = value

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def become(self, run: int, open: int) -> None:
        """Gives a job that is not in flight another task, and what counts its tasks."""
        self.words[words.OPEN // 8], self.words[words.RUN // 8] = open, run

    @property
    def after(self) -> int:
        """How many jobs before it stands the one that must be complete; 0: none."""
        return int(self.words[words.AFTER // 8])

    @after.setter
    def after(self, jobs: int) -> None:
        self.words[words.AFTER // 8] = jobs

    @property
    def tasks(self) -> int:
        """Of the last time, or of the next one if nothing counts them."""
        return int(self.words[words.TASKS // 8])

    @tasks.setter
    def tasks(self, count: int) -> None:
        self.words[words.TASKS // 8] = count

    @property
    def times(self) -> tuple[int, int]:
        """When it was opened and complete the last time, ns of the monotonic clock."""
        opened, completed = self.words[words.OPENED_AT // 8], self.words[words.COMPLETED_AT // 8]
        return int(opened), int(completed)

    def describe(self, task: int) -> str:
        """What a task does; -1 is the one that opens the job."""
        if task < 0:
            return f"opening {self.name}"
        what = self._describe(task) if self._describe else ""
        return f"task {task} of {self.name}" + (f" ({what})" if what else "")


class Jobs:
    """Jobs that are published together, in order: a step, or one call."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._addresses = np.array([job.address for job in jobs], np.int64)
        self.address, self.count = int(self._addresses.ctypes.data), len(self.jobs)
        self._ring: object = None

    def belong_to(self, ring: object) -> None:
        """Numbers are those of one ring: on another, what earlier ones left must not count."""
        if ring is not self._ring:
            for job in self.jobs:
                for word in (words.CLAIMED, words.OPENED, words.TAKEN, words.COMPLETED):
                    job.words[word // 8] = 0
            self._ring = ring


class TaskError(RuntimeError):
    """A task failed; the pool stays usable.

    Attributes:
        status: what it returned.
        task: its number in its job; -1: the one that opens the job.
    """

    def __init__(self, what: str, task: int, status: int) -> None:
        super().__init__(f"{what} failed with status {status}")
        self.task, self.status = task, status


def float_bits(value: float) -> int:
    """A float32's bits, as records hold it."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
