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
        setup: address of the task that counts the others; 0: always ``tasks``.
        after: how many places before it the jobs stand that must be complete; 0 or none: it waits
            for no job.
        describe: what the task of a number does, in words; None if the job's name says it.
        node: index of the pool's NUMA node whose workers run it; None: all workers.

    Attributes:
        wait_for: address of the int64 flag that opens it; 0: none. ``signal``: that of the one that
            it counts up when it is complete.
    """

    def __init__(
        self,
        name: str,
        run: int,
        record: int,
        setup: int = 0,
        tasks: int = 1,
        after: int | Sequence[int] = 1,
        describe: Callable[[int], str] | None = None,
        node: int | None = None,
    ) -> None:
        self.name, self._describe = name, describe
        raw = np.zeros(words.JOB_BYTES // 8 + 8, np.int64)
        skip = -raw.ctypes.data % words.LINE // 8
        self.words = raw[skip : skip + words.JOB_BYTES // 8]
        for at, value in (
            (words.SETUP, setup),
            (words.RUN, run),
            (words.RECORD, record),
            (words.TASKS, tasks),
            (words.NODE, 0 if node is None else node + 1),
        ):
            self.words[at // 8] = value
        self.after = (after,) if isinstance(after, int) else tuple(after)

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def again(self) -> Job:
        """The same job with a record of its own, which may be in the ring beside this one's."""
        job = Job(self.name, 0, 0, after=self.after, describe=self._describe)
        for at in (
            words.SETUP,
            words.RUN,
            words.RECORD,
            words.TASKS,
            words.NODE,
            words.WAIT_FOR,
            words.SIGNAL,
        ):
            job.words[at // 8] = self.words[at // 8]
        return job

    def set_task(self, run: int, setup: int, record: int | None = None) -> None:
        """Gives a job that is not in flight another task, and what counts its tasks; both read
        ``record``, or what they read before."""
        self.words[words.SETUP // 8], self.words[words.RUN // 8] = setup, run
        if record is not None:
            self.words[words.RECORD // 8] = record

    @property
    def after(self) -> tuple[int, ...]:
        """How many places before it the jobs stand that must be complete."""
        return tuple(int(distance) for distance in self._after)

    @after.setter
    def after(self, distances: Sequence[int]) -> None:
        self._after = np.array([d for d in distances if d], np.int64)
        self.words[words.AFTER // 8] = self._after.ctypes.data
        self.words[words.AFTER_COUNT // 8] = len(self._after)

    @property
    def wait_for(self) -> int:
        return int(self.words[words.WAIT_FOR // 8])

    @wait_for.setter
    def wait_for(self, flag: int) -> None:
        self.words[words.WAIT_FOR // 8] = flag

    @property
    def signal(self) -> int:
        return int(self.words[words.SIGNAL // 8])

    @signal.setter
    def signal(self, flag: int) -> None:
        self.words[words.SIGNAL // 8] = flag

    @property
    def tasks(self) -> int:
        """Tasks of the last run, or of the next one if nothing counts them."""
        return int(self.words[words.TASKS // 8])

    @tasks.setter
    def tasks(self, count: int) -> None:
        self.words[words.TASKS // 8] = count

    @property
    def times(self) -> tuple[int, int]:
        """When its setup began and when it was complete the last time, ns of the monotonic
        clock."""
        begun, completed = self.words[words.SETUP_AT // 8], self.words[words.COMPLETED_AT // 8]
        return int(begun), int(completed)

    def describe(self, task: int) -> str:
        """What a task does; -1 is its setup."""
        if task < 0:
            return f"the setup of {self.name}"
        what = self._describe(task) if self._describe else ""
        return f"task {task} of {self.name}" + (f" ({what})" if what else "")


class Jobs:
    """Jobs that are published together, in order: a step, or one call.

    They are over when the last one is, so that one waits for all others, itself or through them.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        waited = {len(self.jobs) - 1}
        for i in range(len(self.jobs) - 1, -1, -1):
            assert i in waited, f"nothing waits for {self.jobs[i].name}"
            waited.update(i - distance for distance in self.jobs[i].after)
        self._addresses = np.array([job.address for job in jobs], np.int64)
        self.address, self.count = int(self._addresses.ctypes.data), len(self.jobs)
        self._ring: object = None

    def belong_to(self, ring: object, head: int) -> None:
        """Numbers are those of one ring: on another, what earlier ones left must not count, and up
        to its ``head`` all are complete."""
        if ring is not self._ring:
            for job in self.jobs:
                job.words[words.TAKEN // 8] = 0
                for word in (words.CLAIMED, words.READY, words.COMPLETED):
                    job.words[word // 8] = head
            self._ring = ring


def in_parallel(jobs: Sequence[Job]) -> Jobs:
    """Jobs that wait for no other one, and are over together."""
    for job in jobs:
        job.after = ()
    end = Job("end", 0, 0, tasks=0, after=range(1, len(jobs) + 1))
    return Jobs([*jobs, end])


class TaskError(RuntimeError):
    """A task failed; the pool stays usable.

    Attributes:
        status: what it returned.
        task: its number in its job; -1: the setup.

    What a kernel raised is its ``__cause__``, and named in its text.
    """

    def __init__(
        self, what: str, task: int, status: int, cause: BaseException | None = None
    ) -> None:
        how = f"failed with status {status}"
        if cause is not None:
            how = f"raised {type(cause).__name__}: {cause}".removesuffix(": ")
        super().__init__(f"{what} {how}")
        self.task, self.status, self.__cause__ = task, status, cause


def float_bits(value: float) -> int:
    """A float32's bits, as records hold it."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
