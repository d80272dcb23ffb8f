"""The worker threads of a ring, one a core: what a step's jobs run on."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from pykernels.env import env
from pykernels.errors import PykernelsError

from ..machine.topology import Topology
from . import ring as words
from .worker_pool import spin_budget, whole_threads

_SLOTS = 1 << 13
"""Jobs that may be published and not yet passed by every worker; a step has a few hundred."""


class Job:
    """One job's record in the ring's layout, and what it must keep alive.

    Args:
        run, record: address of the task (``pykernels.cpu.jit.TASK``) and of what it reads.
        open: address of the task that counts the others; 0: always ``tasks``.
        after: how many jobs before it stands the one that must be complete; 0: none.
    """

    def __init__(
        self, name: str, run: int, record: int, open: int = 0, tasks: int = 1, after: int = 1
    ) -> None:
        self.name = name
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

    @property
    def after(self) -> int:
        """How many jobs before it stands the one that must be complete; 0: none."""
        return int(self.words[words.AFTER // 8])

    @after.setter
    def after(self, jobs: int) -> None:
        self.words[words.AFTER // 8] = jobs

    @property
    def times(self) -> tuple[int, int]:
        """When it was opened and complete the last time, ns of the monotonic clock."""
        opened, completed = self.words[words.OPENED_AT // 8], self.words[words.COMPLETED_AT // 8]
        return int(opened), int(completed)


class Jobs:
    """Jobs that are published together, in order: a step."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._addresses = np.array([job.address for job in jobs], np.int64)
        self.address, self.count = int(self._addresses.ctypes.data), len(self.jobs)


class StepError(RuntimeError):
    """A task of a step failed; the message says of which job."""


class RingPool:
    """``threads`` threads for the jobs of a ring, of which the driver is one if ``driver_works``.

    One thread at a time may ``run``; the engine's, or in a notebook whoever holds ``lock``.

    Raises:
        PykernelsError: more threads than usable cores, fewer than one, or no whole number; the
            system refuses a thread or a core.
    """

    def __init__(
        self,
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
        spin_us: float | None = None,
    ) -> None:
        topology = topology or Topology.detect()
        wanted = whole_threads(env.threads if threads is None else threads)
        self.threads = topology.default_threads(driver_works) if wanted is None else wanted
        if not 1 <= self.threads <= topology.usable:
            raise PykernelsError(
                f"{self.threads} threads asked for, {topology.usable} cores are usable",
                f"Use 1 to {topology.usable} threads",
            )
        self.driver_works, self.lock = driver_works, threading.Lock()
        places = self.threads * words.LINE // 8
        memory = np.zeros(words.RING_BYTES // 8 + 8 + places + _SLOTS, np.int64)
        skip = -memory.ctypes.data % words.LINE // 8
        self._memory = memory
        self._ring = memory[skip : skip + words.RING_BYTES // 8]
        self.ring = int(self._ring.ctypes.data)
        self._ring[words.PLACES // 8] = self.ring + words.RING_BYTES
        self._ring[words.SLOTS // 8] = self.ring + words.RING_BYTES + 8 * places
        self._ring[words.MASK // 8] = _SLOTS - 1
        spin = spin_budget(driver_works) if spin_us is None else spin_us
        self._ring[words.SPIN_NS // 8] = int(spin * 1000)
        self.closed = False
        self._published: Jobs | None = None  # the last: a worker may still be on its way past it
        words.work(self.ring, 0, 1, 1)  # compiled before a thread waits for it
        _open.add(self)
        self._threads = [
            threading.Thread(
                target=words.worker_loop, args=(self.ring, worker, 1), name=f"ring-{worker}",
                daemon=True,
            )
            for worker in range(1 if driver_works else 0, self.threads)
        ]  # fmt: skip
        try:
            for thread in self._threads:
                thread.start()
            for thread, core in zip(self._threads, topology.order, strict=False):
                assert thread.native_id is not None
                os.sched_setaffinity(thread.native_id, {core})
        except (RuntimeError, OSError) as error:
            self.close()
            raise PykernelsError(
                f"the system refuses a worker thread: {error}",
                "Raise the limit (ulimit -u, a container's --pids-limit), or take fewer threads",
            ) from None

    def run(self, jobs: Jobs) -> None:
        """Publishes a step and returns when its last job is complete.

        Raises:
            StepError: a task failed.
        """
        if jobs is not self._published:
            words.pass_by(self.ring, 1 if self.driver_works else 0, self.threads)
            self._published = jobs
        status = words.run_step(self.ring, jobs.address, jobs.count, self.driver_works)
        if status:
            raise self._failure(jobs, status)

    def _failure(self, jobs: Jobs, status: int) -> StepError:
        at = int(self._ring[words.FAILED_JOB // 8])
        task = int(self._ring[words.FAILED_TASK // 8])
        name = next((job.name for job in jobs.jobs if job.address == at), "?")
        return StepError(f"task {task} of {name} failed with status {status}")

    def close(self) -> None:
        """Ends the workers and waits for them; safe to call twice."""
        if not self.closed:
            self.closed = True
            words.stop(self.ring)
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()

    def __enter__(self) -> RingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_open: weakref.WeakSet[RingPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open):
        pool.close()


def float_bits(value: float) -> int:
    """A float32's bits, as records hold it."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
