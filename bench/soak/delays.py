"""Random delays and failures of both halves of a step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from pykernels.cpu.intrin.sync import atomic_load, atomic_store, clock_ns, pause
from pykernels.cpu.jit import task
from runtime.devices.cuda.step.executable import CudaExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.pool import WorkerPool

FAILED = -7
"""Status of a job that fails on purpose."""
MOST_NS, FAILS_IN = 1, 2
LONG_IN = 16
"""One delay in so many is up to the longest, the others up to a sixteenth of it."""


@task("soak-delay")
def delay(record, index, worker):
    """Spins for a random time, and then has no tasks, or fails.

    ``record``: int64 [3], the state of its random numbers, ``MOST_NS`` and ``FAILS_IN``.
    """
    state = atomic_load(record) * 6364136223846793005 + 1442695040888963407
    atomic_store(record, state)
    drawn = (state >> 33) & 0x3FFFFFFF
    most = atomic_load(record + 8 * MOST_NS)
    if drawn % LONG_IN != 0:
        most //= LONG_IN
    end = clock_ns() + (drawn // LONG_IN) % (most + 1)
    while clock_ns() < end:
        pause()
    fails = atomic_load(record + 8 * FAILS_IN)
    return FAILED if fails > 0 and (drawn // 64) % fails == 0 else 0


class Delays:
    """Makes a runner's steps late.

    Args:
        most_us: of one delay; the CPU has one a layer, few of them long.
        late_in: one step in so many has no time at all; ``fails_in``: one delay in so many fails.

    Attributes:
        late: steps that had no time.
    """

    def __init__(
        self, pool: WorkerPool, seed: int, most_us: int, late_in: int, fails_in: int
    ) -> None:
        self.pool, self.most_us, self.late_in, self.late = pool, most_us, late_in, 0
        self._random = random.Random(seed)
        self._record = np.array([seed, most_us * 1000, fails_in], np.int64)

    def add(self, runner: PagedRunner) -> None:
        """Delays all programs that have a half on the CPU."""
        address = delay.address
        assert address is not None
        for step in {id(step): step for step in (*runner.steps, *runner.decode_steps)}.values():
            if not isinstance(step, RefExecutable | CudaExecutable) or step.cpu is None:
                continue
            for job in step.cpu.jobs.jobs:
                if job.wait_for:  # it stands for a flag, and has no task of its own
                    job.set_task(0, address, self._record.ctypes.data)
            step.before = self._before(step)
            if isinstance(step, RefExecutable) and step.link is not None:
                step.link.delay = lambda: time.sleep(self._drawn_us() / 1e6)

    def _before(self, step: RefExecutable | CudaExecutable) -> Callable[[], None]:
        before = step.before

        def late() -> None:
            hit = self._random.randrange(self.late_in) == 0
            self.late += hit
            self.pool.limit_steps(0 if hit else 60)
            before()
            if isinstance(
                step, CudaExecutable
            ):  # the stream, behind the step's inputs; at 1 to 2 GHz
                with torch.cuda.device(step.memory.device):
                    torch.cuda._sleep(1500 * self._drawn_us())

        return late

    def _drawn_us(self) -> int:
        most = self.most_us if self._random.randrange(LONG_IN) == 0 else self.most_us // LONG_IN
        return self._random.randint(0, most)
