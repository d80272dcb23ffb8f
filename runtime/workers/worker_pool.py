"""Persistent worker threads, one a core, that run one fused MoE call after another."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from operator import index
from typing import NamedTuple, SupportsIndex

import numpy as np

from pykernels.cpu import Workspace
from pykernels.env import env
from pykernels.errors import PykernelsError

from ..machine.topology import Topology
from . import control_block as block
from . import queue
from .control import NAP, Control, align, until_done

_SPIN_US, _SPIN_US_BESIDE_GPU, _MOST_SPIN_US = 50.0, 1000.0, 1e9


def spin_budget(driver_works: bool) -> float:
    """Microseconds that an idle thread spins: PYKERNELS_SPIN_US, or else what suits the driver.

    Waking a sleeper takes up to 50 us. Where torch computes on the same cores between the calls, a
    longer spin would hold it up; beside a GPU the workers' cores have nothing else to do.
    """
    if (asked := env.spin_us) is not None:
        return asked
    return _SPIN_US if driver_works else _SPIN_US_BESIDE_GPU


def whole_threads(threads: object) -> int | None:
    """A number of threads as asked for; None stays None.

    Raises:
        PykernelsError: it is no whole number.
    """
    if threads is None:
        return None
    if isinstance(threads, bool) or not isinstance(threads, SupportsIndex):
        raise PykernelsError(
            f"{threads!r} threads asked for, which is no whole number", "Give an int, or None"
        )
    return index(threads)


class Call(NamedTuple):
    """One fused MoE call, as the workers need it.

    ``gate_up``, ``down``, ``pack`` and ``rows`` are addresses of ``pykernels.cpu.jit.TASK``
    functions, ``job`` is their first argument. Task indices: see ``pykernels.cpu.moe``.
    ``down_splits`` are the down tasks of each of the ``down_chunks`` runs of outputs, see
    ``queue``. ``piece_active``, ``pieces`` and ``experts`` are addresses of int64 arrays: the
    active expert of each pack task, the pack tasks of each active expert, and its number in the
    layer (0: none).
    """

    gate_up: int
    down: int
    job: int
    active: int
    i_chunks: int
    down_chunks: int
    down_splits: int = 1
    pack: int = 0
    pack_tasks: int = 0
    piece_active: int = 0
    pieces: int = 0
    rows: int = 0
    row_tasks: int = 0
    experts: int = 0


class WorkerPool(Control):
    """``threads`` threads for the experts; each stays in one ``nogil`` loop until ``close``.

    The workers are pinned, each to a core of its own, in ``Topology.order``. With ``driver_works``
    the thread that waits for a call is one of the ``threads`` (right where nothing else keeps it
    busy); without, all of them are workers and the driver only waits (right beside a GPU).

    Args:
        threads: None for PYKERNELS_THREADS, or else ``Topology.default_threads``.
        topology: whose cores to take; None for this machine's.
        node: NUMA node that the memory of its experts is bound to; None for not bound.
        spin_us: how long an idle thread spins before it sleeps; None for ``spin_budget``'s.

    Attributes:
        ended: whether ``close`` has returned: no call runs, nor will one. A flag of its own,
            since ``__del__`` may come at the end of the interpreter, when modules are empty.

    Raises:
        PykernelsError: more threads than usable cores, fewer than one, or no whole number; a bad
            ``spin_us``; the system refuses a thread or a core.
    """

    ended = False

    def __init__(
        self,
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
        node: int | None = None,
        spin_us: float | None = None,
    ) -> None:
        topology = topology or Topology.detect()
        wanted = whole_threads(env.threads if threads is None else threads)
        self.threads = topology.default_threads(driver_works) if wanted is None else wanted
        self.node = node
        if not 1 <= self.threads <= topology.usable:
            raise PykernelsError(
                f"{self.threads} threads asked for, {topology.usable} cores are usable",
                f"Use 1 to {topology.usable} threads",
            )
        spin_us = spin_budget(driver_works) if spin_us is None else spin_us
        number = isinstance(spin_us, (int, float))
        if not (number and 0 <= spin_us <= _MOST_SPIN_US):  # nan neither
            raise PykernelsError(
                f"spin_us={spin_us} is no time to spin", "Give microseconds, 0 to 1e9"
            )
        super().__init__(driver_works, spin_us)
        self._barriers, self._barrier_memory = 0, list[np.ndarray]()
        self.reserve_barriers(128)
        self.workspace = Workspace()  # shared by the layers: one call runs at a time
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
        self._start_threads()
        _open_pools[id(self)] = self
        self._pin(topology.order)

    @property
    def pools(self) -> Sequence[WorkerPool]:
        """Itself alone: what ``NodePools`` has one of for each NUMA node."""
        return (self,)

    def _start_threads(self) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise PykernelsError(
                f"the system refuses a worker thread: {error}",
                "Raise the limit (ulimit -u, a container's --pids-limit), or take fewer threads",
            ) from None

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
        """Room for the barriers of a call (``block.BARRIERS``); the pool must be claimed."""
        count = 2 * active + down_chunks
        if count > self._barriers:
            count = max(count, 2 * self._barriers)
            memory = np.zeros(count * block.BARRIER_BYTES // 8 + 8, np.int64)
            # In this order, for Ctrl-C in between. The old memory is kept: together less than this.
            self._barrier_memory.append(memory)
            self._word[block.BARRIERS // 8] = align(memory.ctypes.data)
            self._barriers = count

    def start(self, call: Call) -> int:
        """Hands a call to the workers and returns its number; ``wait`` ends it. One at a time.

        Raises:
            PykernelsError: as ``claim``.
        """
        number = 0
        try:
            self.claim()
            self.reserve_barriers(call.active, call.down_chunks)
            number = queue.publish(self.control, threading.get_ident(), tuple(call))
            if number == block.NOT_RUNNING:
                raise self.refusal()
            self.hand_out()
        except BaseException:
            self.release()
            self.abandon()
            if number > 0:  # even if it was handed out: the caller does not get its number
                self.settle(number)
            raise
        return number

    def run(self, call: Call) -> None:
        """``start`` and ``wait``; Ctrl-C is raised when the call has ended.

        Raises:
            PykernelsError: as ``claim``.
            TaskError: as ``wait``.
        """
        me = threading.get_ident()
        try:
            self.claim()
            self.reserve_barriers(call.active, call.down_chunks)
            number, status = queue.run(self.control, me, self.driver_works, tuple(call))
        except BaseException:
            self.release()
            raise
        if status == block.NOT_RUNNING:
            raise self.refusal()
        self._check(number, status)

    def _elsewhere(self) -> set[int | None]:
        others = (pool for pool in _open_now() if pool is not self)
        return {thread.ident for pool in others for thread in pool._threads}

    def close(self) -> None:
        """Ends the workers; waits for them, and for a call: ``sync`` still returns its result.

        Safe to call twice; if Ctrl-C cuts it short, the second call does the rest.
        """
        while (state := self._word[block.STATE // 8]) not in (block.CLOSED, block.FORKED):
            if state >= block.FREE:  # a call that another thread prepares will be refused
                if queue.change_state(self.control, state, block.CLOSED) == state:
                    break
            elif state == block.LAUNCHING:
                time.sleep(NAP)
            else:
                self.settle()
        if self._word[block.STATE // 8] == block.FORKED:
            self.ended = True
            return  # its threads are the parent's
        queue.stop(self.control)
        for thread in self._threads:
            if thread.ident is not None:  # else Ctrl-C came before it was started
                thread.join()
        _open_pools.pop(id(self), None)
        self.ended = True

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_threads") and not self.ended:
            until_done(self.close)  # the workers use memory that is freed with this


def _worker_main(memory: np.ndarray, control: int, worker: int) -> None:
    """A worker thread; it keeps the control block's memory alive."""
    queue.worker_loop(control, worker)


_open_pools: weakref.WeakValueDictionary[int, WorkerPool] = weakref.WeakValueDictionary()


def _open_now() -> list[WorkerPool]:
    """The open pools, as a copy: other threads may make and close some meanwhile."""
    return [pool for alive in _open_pools.valuerefs() if (pool := alive()) is not None]


def _forked() -> None:
    """In a forked child, which has a copy of the control blocks but none of the threads."""
    for pool in _open_now():
        pool._word[block.STATE // 8] = block.FORKED


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _close_all() -> None:
    for pool in _open_now():
        pool.close()
