"""Persistent worker threads, one a core, that run one fused MoE call after another."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pykernels.cpu import Workspace
from pykernels.env import env
from pykernels.errors import PykernelsError

from . import tasks
from .topology import Topology

_SPIN_US, _SPIN_US_BESIDE_GPU = 50.0, 1000.0


def spin_budget(driver_works: bool) -> float:
    """Microseconds that an idle thread spins: PYKERNELS_SPIN_US, or else what suits the driver.

    Waking a sleeper takes up to 50 us. Where torch computes on the same cores between the calls, a
    longer spin would hold it up; beside a GPU the workers' cores have nothing else to do.
    """
    if (asked := env.spin_us) is not None:
        return asked
    return _SPIN_US if driver_works else _SPIN_US_BESIDE_GPU


class TaskError(RuntimeError):
    """A task returned a status other than 0; the pool stays usable.

    Attributes:
        status: what it returned.
        stage: "rows", "pack", "gate-up" or "down".
        index: its number in the stage.
        active: which of the call's active experts it worked on; None for rows, which are all's.
    """

    def __init__(
        self, status: int, stage: str, index: int, active: int | None, expert: int | None = None
    ) -> None:
        self.status, self.stage, self.index, self.active = status, stage, index, active
        of = f" of active expert {active}" if expert is None else f" of expert {expert}"
        where = "" if active is None else of
        super().__init__(f"{stage} task {index}{where} failed with status {status}")


class Call(NamedTuple):
    """One fused MoE call, as the workers need it.

    ``gate_up``, ``down``, ``pack`` and ``rows`` are addresses of ``pykernels.cpu.jit.TASK``
    functions, ``job`` is their first argument. Task indices are those of ``pykernels.cpu.moe``.
    ``piece_active`` and ``pieces`` are addresses of int64 arrays: the active expert of each pack
    task, and the pack tasks of each active expert.
    """

    gate_up: int
    down: int
    job: int
    active: int
    i_chunks: int
    down_chunks: int
    pack: int = 0
    pack_tasks: int = 0
    piece_active: int = 0
    pieces: int = 0
    rows: int = 0
    row_tasks: int = 0


class WorkerPool:
    """``threads`` threads for the experts; each stays in one ``nogil`` loop until ``close``.

    The workers are pinned, each to a core of its own, in ``Topology.order``. With ``driver_works``
    the thread that waits for a call is one of the ``threads`` (right where nothing else keeps it
    busy); without, all of them are workers and the driver only waits (right beside a GPU).

    Args:
        threads: None for PYKERNELS_THREADS, or else ``Topology.default_threads``.
        topology: whose cores to take; None for this machine's.
        node: NUMA node that the memory of its experts is bound to; None for not bound.
        spin_us: how long an idle thread spins before it sleeps; None for ``spin_budget``'s.

    Raises:
        PykernelsError: more threads than usable cores, fewer than one, or a core that is refused.
    """

    def __init__(
        self,
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
        node: int | None = None,
        spin_us: float | None = None,
    ) -> None:
        topology = topology or Topology.detect()
        wanted = env.threads if threads is None else threads
        self.threads = topology.default_threads(driver_works) if wanted is None else wanted
        self.driver_works = driver_works
        self.node = node
        if not 1 <= self.threads <= topology.usable:
            raise PykernelsError(
                f"{self.threads} threads asked for, {topology.usable} cores are usable",
                f"Use 1 to {topology.usable} threads",
            )
        raw = np.zeros(tasks.CONTROL_BYTES // 8 + 8, np.int64)
        self.control = _align(raw.ctypes.data)
        self._words = raw[(self.control - raw.ctypes.data) // 8 :]
        spin_us = spin_budget(driver_works) if spin_us is None else spin_us
        self._words[tasks.SPIN_NS // 8] = int(spin_us * 1000)
        self._reserve_barriers(64)
        self.workspace = Workspace()  # shared by the layers: one call runs at a time
        self._running: Call | None = None
        self._guard = threading.Lock()  # of the two words that say who has the pool
        self._claimed_by: int | None = None
        self._closed = False
        self._pid = os.getpid()
        tasks.compile_all()  # under the GIL, before any thread asks; and Ctrl-C finds them compiled
        first = 1 if driver_works else 0
        self._threads = [
            threading.Thread(
                target=_worker_main,
                args=(self._words, self.control, worker),
                name=f"pykernels-{worker}",
                daemon=True,
            )
            for worker in range(first, self.threads)
        ]
        for thread in self._threads:
            thread.start()
        _open_pools.add(self)
        self._pin(topology.order)

    @property
    def pools(self) -> Sequence[WorkerPool]:
        """Itself alone: what ``NodePools`` has one of for each NUMA node."""
        return (self,)

    def _pin(self, cores: Sequence[int]) -> None:
        for thread, core in zip(self._threads, cores, strict=False):
            assert thread.native_id is not None  # it runs
            try:
                os.sched_setaffinity(thread.native_id, {core})
            except OSError as error:
                self.close()
                raise PykernelsError(
                    f"a worker cannot be pinned to core {core}: {error.strerror}",
                    "Check the cpuset of this process; it may have changed while it ran",
                ) from None

    def _reserve_barriers(self, active: int) -> None:
        """Room for the barriers of a call of so many experts."""
        self._barriers_for = active
        self._barrier_memory = np.zeros(2 * active * tasks.BARRIER_BYTES // 8 + 8, np.int64)
        self._barriers = _align(self._barrier_memory.ctypes.data)

    def claim(self) -> None:
        """Keeps the pool for a call that this thread prepares, in the ``workspace`` that all share,
        until it starts or ``release`` gives it up.

        Raises:
            PykernelsError: a call is running, another thread prepares one, or this is a forked
                child.
        """
        self._check_process()
        me = threading.get_ident()
        with self._guard:
            # A claim of this thread's own was left behind by Ctrl-C: it prepares nothing now.
            if self._claimed_by not in (None, me):
                raise PykernelsError(
                    "another thread prepares a call on this pool", "Make one call after the other"
                )
            if self._running is not None:
                raise PykernelsError(
                    "a call is still running on this pool", "sync it before the next submit"
                )
            self._claimed_by = me

    def release(self) -> None:
        """Gives up what this thread has claimed, if it has not started a call since."""
        with self._guard:
            if self._claimed_by == threading.get_ident():
                self._claimed_by = None

    def start(self, call: Call) -> None:
        """Hands a call to the workers and returns; ``wait`` ends it. One call at a time.

        Raises:
            PykernelsError: as ``claim``, or the pool is closed.
        """
        if self._closed:
            raise PykernelsError("the worker pool is closed", "Make a new WorkerPool")
        if self._claimed_by != threading.get_ident():
            self.claim()
        if call.active > self._barriers_for:
            self._reserve_barriers(2 * call.active)
        self._running = call
        self._claimed_by = None  # after it: nobody finds the pool free between the two
        tasks.publish(self.control, self._barriers, *call)

    def wait_for_rows(self) -> None:
        """Waits until the call that was started has copied its inputs; works along as in ``wait``.

        A task that fails is told by ``wait``.
        """
        self._check_process()
        tasks.finish_rows(self.control, self.driver_works)

    def wait(self) -> float:
        """Waits for the call in flight; returns the seconds from its start to its last task.

        Raises:
            PykernelsError: no call is in flight, or this is a forked child.
            TaskError: a task failed; which is the first one that did.
        """
        call = self._running
        if call is None:
            raise PykernelsError("no call is running on this pool", "submit one before sync")
        self._check_process()  # its workers would never end it here
        try:
            status = tasks.finish(self.control, self.driver_works)
        finally:  # Ctrl-C arrives when the call has ended: it must not leave the pool taken
            self._running = None
        if status != 0:
            raise self._failure(call, status)
        words = self._words
        return int(words[tasks.FINISHED_AT // 8] - words[tasks.STARTED_AT // 8]) / 1e9

    @property
    def running(self) -> Call | None:
        """The call that was started and not waited for yet."""
        return self._running

    def settle(self) -> None:
        """Waits for a call that nobody will wait for, since Ctrl-C came right behind its start."""
        if self._running is not None and self._pid == os.getpid():
            tasks.finish(self.control, self.driver_works)
            self._running = None

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise PykernelsError(
                "this worker pool belongs to the parent process; threads do not survive a fork",
                "Make the pool in the process that uses it, or start that with 'spawn'",
            )

    def _failure(self, call: Call, status: int) -> TaskError:
        stage = tasks.STAGES[self._words[tasks.FAILED_STAGE // 8]]
        index = int(self._words[tasks.FAILED_INDEX // 8])
        if stage == "rows":
            return TaskError(status, stage, index, None)
        if stage == "pack":
            pieces = (ctypes.c_int64 * call.pack_tasks).from_address(call.piece_active)
            active = pieces[index]
        else:
            active = index // call.i_chunks if stage == "gate-up" else index % call.active
        return TaskError(status, stage, index, active)

    def close(self) -> None:
        """Ends the workers; waits for them. Safe to call twice."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self.settle()
        tasks.stop(self.control)
        for thread in self._threads:
            thread.join()
        _open_pools.discard(self)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self.close()


def _align(address: int) -> int:
    return -(-address // 64) * 64


def _worker_main(memory: np.ndarray, control: int, worker: int) -> None:
    """A worker thread; it keeps the control block's memory alive."""
    tasks.worker_loop(control, worker)


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
