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
from numba import types

from pykernels.cpu import Workspace, raised
from pykernels.cpu.jit import direct
from pykernels.env import env
from pykernels.errors import PykernelsError

from . import tasks
from .topology import Topology

_STATE, _NUMBER = tasks.STATE // 8, tasks.EPOCH // 8
_STARTED_AT, _FINISHED_AT = tasks.STARTED_AT // 8, tasks.FINISHED_AT // 8

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
    """A task raised, or returned a status other than 0; the pool stays usable.

    Attributes:
        status: what it returned.
        stage: "rows", "pack", "gate-up" or "down"; "" where something that tasks call raised, and
            none of them knows.
        index: its number in the stage.
        active: which of the call's active experts it worked on; None for rows, which are all's.
        raised: what it raised, also the cause of this one; None if it returned the status.
    """

    def __init__(
        self,
        status: int,
        stage: str,
        index: int,
        active: int | None,
        expert: int | None = None,
        raised: BaseException | None = None,
    ) -> None:
        self.status, self.stage, self.index, self.active = status, stage, index, active
        self.raised = self.__cause__ = raised
        of = f" of active expert {active}" if expert is None else f" of expert {expert}"
        where = "" if active is None else of
        how = f"failed with status {status}" if raised is None else f"raised {raised!r}"
        super().__init__(f"{stage} task {index}{where} {how}" if stage else f"a task {how}")


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
    legs: int = 1
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
        self._word = self._words.data  # the same as a memoryview: numpy's scalars are slow
        spin_us = spin_budget(driver_works) if spin_us is None else spin_us
        self._words[tasks.SPIN_NS // 8] = int(spin_us * 1000)
        self._barriers, self._barrier_memory = 0, list[np.ndarray]()
        self.reserve_barriers(128)
        self.workspace = Workspace()  # shared by the layers: one call runs at a time
        tasks.compile_all()  # under the GIL, before any thread asks; and Ctrl-C finds them compiled
        self._finish = direct(
            tasks.finish, types.int64, types.boolean, types.int64, types.int64, types.int64
        )
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

    def reserve_barriers(self, active: int, down_chunks: int = 0) -> None:
        """Room for the barriers of a call (``tasks.BARRIERS``); for who has claimed the pool."""
        count = 2 * active + down_chunks
        if count > self._barriers:
            count = max(count, 2 * self._barriers)
            memory = np.zeros(count * tasks.BARRIER_BYTES // 8 + 8, np.int64)
            # In this order Ctrl-C may come at any time; and what there was stays, less than this.
            self._barrier_memory.append(memory)
            self._word[tasks.BARRIERS // 8] = _align(memory.ctypes.data)
            self._barriers = count

    def claim(self) -> None:
        """Keeps the pool for a call that this thread prepares, in the ``workspace`` that all share,
        until it starts or ``release`` gives it up.

        Raises:
            PykernelsError: a call is running, another thread prepares one, the pool is closed, or
                this is a forked child.
        """
        # A claim of this thread's own was left behind by Ctrl-C: it prepares nothing now.
        if tasks.claim(self.control, threading.get_ident()) != tasks.FREE:
            raise self.refusal()

    def release(self) -> None:
        """Gives up what this thread has claimed, if it has not started a call since."""
        tasks.release(self.control, threading.get_ident())

    def start(self, call: Call) -> None:
        """Hands a call to the workers and returns; ``wait`` ends it. One call at a time.

        Raises:
            PykernelsError: as ``claim``.
        """
        self.claim()
        self.reserve_barriers(call.active, call.down_chunks)
        tasks.publish(self.control, tuple(call))

    def wait_for_rows(self) -> None:
        """Waits until the call that was started has copied its inputs; works along as in ``wait``.

        A task that fails is told by ``wait``.
        """
        if self._word[_STATE] != tasks.RUNNING:
            raise self._nothing_runs()
        tasks.finish_rows(self.control, self.driver_works)

    def end(self, counters: int = 0, tokens: int = 0, nbytes: int = 0) -> None:
        """Waits for the call in flight, which is counted as in ``tasks.finish``.

        Raises:
            PykernelsError: no call is in flight, or this is a forked child.
            TaskError: a task failed; which is the first one that did.
        """
        if self._word[_STATE] != tasks.RUNNING:
            raise self._nothing_runs()
        # Ctrl-C counts when it returns: the pool is free then.
        status = self._finish(self.control, self.driver_works, counters, tokens, nbytes)
        if (status or raised.anything()) and (failure := self._failure(status)):
            raise failure

    def wait(self) -> float:
        """``end``; returns the seconds from the call's start to its last task."""
        self.end()
        return (self._word[_FINISHED_AT] - self._word[_STARTED_AT]) / 1e9

    @property
    def running(self) -> int | None:
        """The number of the call that was started and not waited for yet."""
        return self._word[_NUMBER] if self._word[_STATE] == tasks.RUNNING else None

    def settle(self) -> None:
        """Waits for a call that nobody will wait for, since Ctrl-C came right behind its start."""
        if self._word[_STATE] == tasks.RUNNING:
            self._failure(self._finish(self.control, self.driver_works, 0, 0, 0))  # forgotten

    def refusal(self) -> PykernelsError:
        """Why a call cannot be prepared or started now."""
        match self._word[_STATE]:
            case tasks.FORKED:
                return PykernelsError(
                    "this worker pool belongs to the parent process; threads do not survive a fork",
                    "Make the pool in the process that uses it, or start that with 'spawn'",
                )
            case tasks.CLOSED:
                return PykernelsError("the worker pool is closed", "Make a new WorkerPool")
            case tasks.RUNNING:
                return PykernelsError(
                    "a call is still running on this pool", "sync it before the next submit"
                )
        return PykernelsError(
            "another thread prepares a call on this pool", "Make one call after the other"
        )

    def _nothing_runs(self) -> PykernelsError:
        if self._word[_STATE] == tasks.FORKED:
            return self.refusal()  # its workers would never end the call here
        return PykernelsError("no call is running on this pool", "submit one before sync")

    def _failure(self, status: int) -> TaskError | None:
        """The first failure of the call that ended with this status, if it had one."""
        cause = raised.taken({threading.get_ident(), *(thread.ident for thread in self._threads)})
        if status == 0:
            return TaskError(raised.RAISED, "", 0, None, raised=cause) if cause else None
        cause = cause if status == raised.RAISED else None
        words = self._word
        stage = tasks.STAGES[words[tasks.FAILED_STAGE // 8]]
        index = words[tasks.FAILED_INDEX // 8]
        if stage == "rows":
            return TaskError(status, stage, index, None, raised=cause)
        if stage == "pack":
            pieces = ctypes.c_int64 * words[tasks.PACK_TASKS // 8]
            active = pieces.from_address(words[tasks.PIECE_ACTIVE // 8])[index]
        elif stage == "gate-up":
            active = index // words[tasks.I_CHUNKS // 8]
        else:
            active = index % words[tasks.ACTIVE // 8]
        return TaskError(status, stage, index, active, raised=cause)

    def close(self) -> None:
        """Ends the workers; waits for them. Safe to call twice."""
        if self._word[_STATE] in (tasks.CLOSED, tasks.FORKED):
            return
        while tasks.claim(self.control, tasks.CLOSED) == tasks.RUNNING:
            self.settle()
        self._word[_STATE] = tasks.CLOSED  # where another thread prepares a call, it is refused
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


def _forked() -> None:
    """In a forked child, which has a copy of the control blocks but none of the threads."""
    for pool in list(_open_pools):
        pool._word[_STATE] = tasks.FORKED


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
