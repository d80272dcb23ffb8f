"""Persistent worker threads, one a core, that run one fused MoE call after another."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np

from pykernels.cpu import Workspace
from pykernels.env import env
from pykernels.errors import PykernelsError

from . import tasks
from .topology import Topology


class TaskError(RuntimeError):
    """A task returned a status other than 0; the pool stays usable."""


@dataclass(frozen=True)
class Call:
    """One fused MoE call, as the workers need it.

    ``gate_up``, ``down`` and ``pack`` are addresses of ``pykernels.cpu.jit.TASK`` functions,
    ``job``
    is their first argument. Task indices are those of ``pykernels.cpu.moe``. ``piece_active`` and
    ``pieces`` are addresses of int64 arrays: the active expert of each pack task, and the pack
    tasks of each active expert.
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


class WorkerPool:
    """``threads`` threads for the experts; each stays in one ``nogil`` loop until ``close``.

    The workers are pinned, each to a core of its own, from the last usable core down. With
    ``driver_works`` the thread that waits for a call is one of the ``threads`` (right where nothing
    else keeps it busy); without, all of them are workers and the driver only waits (right beside a
    GPU).

    Raises:
        PykernelsError: more threads than usable cores, or fewer than one.
    """

    def __init__(
        self,
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
    ) -> None:
        topology = topology or Topology.detect()
        wanted = env.threads if threads is None else threads
        self.threads = topology.usable if wanted is None else wanted
        self.driver_works = driver_works
        if not 1 <= self.threads <= topology.usable:
            raise PykernelsError(
                f"{self.threads} threads asked for, {topology.usable} cores are usable",
                f"Use 1 to {topology.usable} threads",
            )
        raw = np.zeros(tasks.CONTROL_BYTES // 8 + 8, np.int64)
        self._control_memory = raw
        self.control = _align(raw.ctypes.data)
        self._word(tasks.SPIN_NS, int(env.spin_us * 1000))
        self._barrier_memory = np.zeros(0, np.int64)
        self.workspace = Workspace()  # shared by the layers: one call runs at a time
        self._running: Call | None = None
        self._closed = False
        self._pid = os.getpid()
        tasks.worker_loop.compile("(int64, int64)")  # under the GIL, before any thread asks for it
        first = 1 if driver_works else 0
        self._threads = [
            threading.Thread(
                target=_worker_main,
                args=(raw, self.control, worker, topology.cores[-1 - (worker - first)]),
                name=f"pykernels-{worker}",
                daemon=True,
            )
            for worker in range(first, self.threads)
        ]
        for thread in self._threads:
            thread.start()
        _open_pools.add(self)

    def _word(self, offset: int, value: int) -> None:
        self._control_memory[(self.control + offset - self._control_memory.ctypes.data) // 8] = (
            value
        )

    def _read(self, offset: int) -> int:
        return int(
            self._control_memory[(self.control + offset - self._control_memory.ctypes.data) // 8]
        )

    def start(self, call: Call) -> None:
        """Hands a call to the workers and returns; ``wait`` ends it. One call at a time."""
        if self._closed:
            raise PykernelsError("the worker pool is closed", "Make a new WorkerPool")
        if self._pid != os.getpid():
            raise PykernelsError(
                "this worker pool belongs to the parent process; threads do not survive a fork",
                "Make the pool in the process that uses it, or start that with 'spawn'",
            )
        if self._running is not None:
            raise PykernelsError(
                "a call is still running on this pool", "sync it before the next submit"
            )
        needed = 2 * call.active * tasks.BARRIER_BYTES // 8 + 8
        if self._barrier_memory.size < needed:
            self._barrier_memory = np.zeros(2 * needed, np.int64)
        self._running = call
        tasks.publish(
            self.control,
            call.gate_up,
            call.down,
            call.job,
            call.active,
            call.i_chunks,
            call.down_chunks,
            call.pack,
            call.pack_tasks,
            call.piece_active,
            call.pieces,
            _align(self._barrier_memory.ctypes.data),
        )

    def wait(self) -> float:
        """Waits for the call in flight; returns the seconds from its start to its last task.

        Raises:
            TaskError: a task failed.
        """
        if self._running is None:
            raise PykernelsError("no call is running on this pool", "submit one before sync")
        try:
            status = tasks.finish(self.control, self.driver_works)
        finally:  # Ctrl-C arrives when the call has ended: it must not leave the pool taken
            self._running = None
        if status != 0:
            raise TaskError(f"an expert task failed with status {status}")
        return (self._read(tasks.FINISHED_AT) - self._read(tasks.STARTED_AT)) / 1e9

    def close(self) -> None:
        """Ends the workers; waits for them. Safe to call twice."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._running is not None:
            tasks.finish(self.control, self.driver_works)
            self._running = None
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


def _worker_main(memory: np.ndarray, control: int, worker: int, core: int) -> None:
    """A worker thread; it keeps the control block's memory alive."""
    os.sched_setaffinity(0, {core})  # 0: this thread
    tasks.worker_loop(control, worker)


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_default: WorkerPool | None = None
_lock = threading.Lock()


def default_pool() -> WorkerPool:
    """The pool that experts share unless given another; made at first use."""
    global _default
    with _lock:
        if _default is None:
            _default = WorkerPool()
        return _default


def configure_default_pool(threads: int | None = None, driver_works: bool = True) -> WorkerPool:
    """Replaces the shared pool; experts without a pool of their own use it from their next call."""
    global _default
    with _lock:
        fresh = WorkerPool(threads, driver_works)
        if _default is not None:
            _default.close()
        _default = fresh
        return fresh


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
