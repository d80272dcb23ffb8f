"""The worker threads of a ring, one a core.

A batch of jobs is in flight until it has ended; the pool holds its buffers as long, and the next
caller waits for it first. Only what begins with a fence may be published behind it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pykernels.cpu import MoEWorkspace, raised
from pykernels.errors import PykernelsError

from ..machine.nodes import MemoryNodes
from ..machine.topology import NumaNode, Topology
from . import ring as words
from .fork import refuse_in_child, settle_in_child
from .job import Jobs, TaskError
from .threads import spin_budget, threads_here, threads_of_nodes
from .trace import WorkerTrace

_ENTRIES = 1 << 13
"""Most published jobs that some worker has not passed yet; a step has a few hundred."""

STEP_LIMIT_S = 120.0
"""How long a batch of jobs waits for the flags of another device."""


class InFlight:
    """A batch of jobs in flight on a pool; the argument of ``wait``.

    Attributes:
        buffers: what the tasks read and write, until they have ended.
        error: the first task's failure; None if none failed, or they have not ended.
        seconds: from publishing, or the end of the batch before, to the last task, which ended at
            ``ended`` (ns of the monotonic clock).
    """

    def __init__(self, first: int, jobs: Jobs, buffers: object) -> None:
        self.first, self.jobs, self.buffers = first, jobs, buffers
        self.done, self.seconds, self.ended = False, 0.0, 0
        self.error: TaskError | None = None
        self._began = time.monotonic_ns()

    @property
    def last(self) -> int:
        """Number of its last job."""
        return self.first + self.jobs.count - 1

    def end(self, error: TaskError | None, after: int = 0) -> None:
        """Called when all tasks have ended; the batch before ended ``after`` that time."""
        self.error = error
        self.ended = self.jobs.jobs[-1].times[1]
        self.seconds = (self.ended - max(self._began, after)) / 1e9
        self.buffers = None
        self.done = True


@dataclass(frozen=True)
class NodeWorkers:
    """The workers of a pool on one NUMA node.

    Attributes:
        first, count: workers ``first .. first + count - 1``.
    """

    first: int
    count: int


class WorkerPool:
    """``threads`` threads that run a ring's jobs; the caller is one of them if ``driver_works``.

    The workers are pinned, each to a core of its own, in ``Topology.order``. With ``driver_works``
    the thread that waits is one of the ``threads`` (right where nothing else keeps it busy);
    without, all of them are workers and the driver only waits (right with a GPU).

    On several NUMA nodes the workers of each are neighbours in number, the driver on the first one.
    A job that is bound to a node (``Job``) is run by its workers alone, so that they read what lies
    in their own memory (SOSP'25 section 3.3); all workers share the others.

    Any thread may use it: they take turns, by ``lock``.

    Args:
        threads: in all; None for PYKERNELS_THREADS, or else ``Topology.default_threads``.
        topology: whose cores to take; None for this machine's.
        nodes: of the topology, which the threads are dealt over; fewer than two: not at all.
        narrow: whether experts that are too narrow for all nodes may be cut into fewer slices.
        spin_us: how long an idle thread spins before it sleeps; None for ``spin_budget``'s.

    Attributes:
        nodes: the workers of each node; one entry where they are not dealt over nodes.
        memory: where the weights are that they read.
        workspaces: scratch of programs that never run at the same time, those of eager modules.
        tracing: what ``trace`` returned while it is on, else None.

    Raises:
        PykernelsError: more threads than usable cores, fewer than one or than nodes, or no whole
            number; the system refuses a thread or a core.
    """

    closed = True  # until it has begun

    def __init__(
        self,
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
        nodes: Sequence[NumaNode] = (),
        narrow: bool = True,
        spin_us: float | None = None,
    ) -> None:
        settle_in_child()
        topology = topology or Topology.detect()
        if len(nodes) < 2:
            dealt, parts = [threads_here(threads, driver_works, topology)], [topology]
            numbers: list[int | None] = [None]
        else:
            dealt = threads_of_nodes(nodes, threads, driver_works, topology)
            parts = [topology.at(node) for node in nodes]
            numbers = [node.number for node in nodes]
        self.threads, self.driver_works = sum(dealt), driver_works
        firsts = [sum(dealt[:i]) for i in range(len(dealt))]
        self.nodes = tuple(map(NodeWorkers, firsts, dealt))
        self.memory = MemoryNodes(tuple(numbers), narrow)
        self.lock = threading.Lock()
        self.workspaces: dict[str, MoEWorkspace] = {}
        places = self.threads * words.LINE // 8
        memory = np.zeros(words.RING_BYTES // 8 + 8 + places + _ENTRIES, np.int64)
        skip = -memory.ctypes.data % words.LINE // 8
        self._ring = memory[skip : skip + words.RING_BYTES // 8]
        self._word = self._ring.data  # the same as a memoryview: numpy's scalars are slow
        self.ring = int(self._ring.ctypes.data)
        self._ring[words.PLACES // 8] = self.ring + words.RING_BYTES
        self._ring[words.ENTRIES // 8] = self.ring + words.RING_BYTES + 8 * places
        self._ring[words.MASK // 8] = _ENTRIES - 1
        for i, node in enumerate(self.nodes):
            for worker in range(node.first, node.first + node.count):
                line = skip + (words.RING_BYTES + worker * words.LINE) // 8
                memory[line + words.WORKER_NODE // 8] = i + 1
        self.limit_steps(STEP_LIMIT_S)
        self.spin_for(spin_budget(driver_works) if spin_us is None else spin_us)
        self._pid = os.getpid()
        self._published: list[Jobs] = []  # a worker may still be on its way past them
        self._in_flight: deque[InFlight] = deque()
        self._ended = 0
        self.tracing: WorkerTrace | None = None
        self._trace: WorkerTrace | None = None  # kept: a worker may still be writing a wait into it
        words.work(self.ring, 0, 1, 1)  # compiled before a thread waits for it
        self._threads = [
            threading.Thread(
                target=_worker_main,
                args=(memory, self.ring, worker),
                name=f"ring-{worker}",
                daemon=True,
            )
            for worker in range(1 if driver_works else 0, self.threads)
        ]
        cores = [
            core
            for count, part in zip(dealt, parts, strict=True)
            for core in part.order[: count - int(driver_works and part is parts[0])]
        ]  # the driver is not pinned
        self.closed = False
        _open.add(self)
        try:
            for thread in self._threads:
                thread.start()
            for thread, core in zip(self._threads, cores, strict=True):
                assert thread.native_id is not None
                os.sched_setaffinity(thread.native_id, {core})
        except (RuntimeError, OSError) as error:
            self.close()
            raise PykernelsError(
                f"the system refuses a worker thread: {error}",
                "Raise the limit (ulimit -u, a container's --pids-limit), or take fewer threads",
            ) from None

    @property
    def is_split(self) -> bool:
        """Whether its threads are dealt over several NUMA nodes."""
        return len(self.nodes) > 1

    def spin_for(self, microseconds: float) -> None:
        """How long an idle worker spins from now on before it sleeps."""
        self._ring[words.SPIN_NS // 8] = int(microseconds * 1000)

    def limit_steps(self, seconds: float) -> None:
        """How long from now on a batch of jobs waits for the flags of another device."""
        self._ring[words.LIMIT_NS // 8] = int(seconds * 1e9)

    def trace(self, on: bool) -> WorkerTrace | None:
        """From now on the workers write down what they do when; or no more."""
        if on and self._trace is None:
            self._trace = WorkerTrace(self.threads)
        self.tracing = self._trace if on else None
        self._ring[words.TRACE // 8] = self.tracing.address if self.tracing else 0
        return self.tracing

    def run(self, jobs: Jobs) -> None:
        """Publishes jobs and returns when the last one is complete.

        Raises:
            PykernelsError: the pool is closed, or the parent process's.
            TaskError: a task failed.
        """
        self._refuse_if_ended()
        with self.lock:
            self.drain()
            self._quiesce(jobs)
            status = words.run_step(self.ring, jobs.address, jobs.count, self.driver_works)
            if status or raised.pending():
                raise self._failure(jobs, status)

    def start(self, jobs: Jobs, buffers: object = None) -> InFlight:
        """Publishes jobs and returns; ``wait`` ends them.

        Args:
            buffers: what the tasks read and write; kept alive until they have ended.

        Raises:
            PykernelsError: the pool is closed, or the parent process's.
        """
        self._refuse_if_ended()
        with self.lock:
            self.drain()
            self._quiesce(jobs)
            # In this order: if Ctrl-C comes in between, the tasks' memory is kept all the same.
            in_flight = InFlight(self.head + 1, jobs, buffers)
            self._in_flight.append(in_flight)
            words.publish(self.ring, jobs.address, jobs.count)
            return in_flight

    @property
    def head(self) -> int:
        """Number of the job that was published last."""
        return int(self._word[words.HEAD // 8])

    def has_entries(self, jobs: Jobs) -> bool:
        """Whether these jobs may be published behind those that are in flight."""
        return jobs.count + sum(each.jobs.count for each in self._in_flight) <= _ENTRIES

    def start_behind(self, jobs: Jobs, buffers: object, arrange: Callable[[int], None]) -> InFlight:
        """Like ``start``, while another batch is in flight; ``jobs`` begin with a fence.

        Args:
            arrange: called with ``head`` before they are published.

        Raises:
            PykernelsError: the pool is closed.
        """
        self._refuse_if_ended()
        with self.lock:
            assert self.head, "a fence waits for a job"
            assert self.has_entries(jobs), "the ring has no room for them"
            assert all(each.jobs is not jobs for each in self._in_flight), "they are in flight"
            self._own(jobs)
            arrange(self.head)
            in_flight = InFlight(self.head + 1, jobs, buffers)
            self._in_flight.append(in_flight)
            words.publish_behind(self.ring, jobs.address, jobs.count)
            return in_flight

    def wait_for_fence(self, in_flight: InFlight) -> None:
        """Waits until the first job of a batch is complete, whose batch before has ended."""
        if not in_flight.done:
            self.refuse_in_child()
            jobs, first = in_flight.jobs, in_flight.first
            words.finish(self.ring, jobs.address, 1, first, self.driver_works)

    def wait(self, in_flight: InFlight) -> InFlight:
        """Waits until its tasks have ended, and runs tasks too if ``driver_works``; see ``error``.

        If Ctrl-C comes meanwhile, it is raised when they have.

        Raises:
            PykernelsError: this is a forked child.
        """
        if not in_flight.done:
            self.refuse_in_child()
            with self.lock:
                while not in_flight.done:
                    self._end_first()
        return in_flight

    def finish(self) -> None:
        """Waits for all batches in flight.

        Raises:
            PykernelsError: the pool is closed, or the parent process's.
        """
        self._refuse_if_ended()
        with self.lock:
            self.drain()

    def drain(self) -> None:
        """Waits for all batches in flight; the caller holds ``lock``."""
        while self._in_flight:
            self._end_first()

    def _end_first(self) -> None:
        """Waits for the batch that was published first of those in flight."""
        in_flight = self._in_flight[0]
        if self.head < in_flight.first:  # Ctrl-C came before it was published
            in_flight.done = True
        else:
            jobs = in_flight.jobs
            status = words.finish(
                self.ring, jobs.address, jobs.count, in_flight.first, self.driver_works
            )
            number = self._word[words.FAILED_NUMBER // 8]  # it may be of the batch behind
            failed = in_flight.first <= number <= in_flight.last if status else raised.pending()
            in_flight.end(self._failure(jobs, status) if failed else None, self._ended)
            self._ended = in_flight.ended
        self._in_flight.popleft()

    def _quiesce(self, jobs: Jobs) -> None:
        """Before jobs are published: waits until no worker reads others any more."""
        if jobs.count > _ENTRIES:
            raise PykernelsError(
                f"{jobs.count} jobs at once", f"The workers' ring has room for {_ENTRIES}"
            )
        if all(jobs is not each for each in self._published):
            words.quiesce(self.ring, 1 if self.driver_works else 0, self.threads)
            self._published.clear()
        self._own(jobs)

    def _own(self, jobs: Jobs) -> None:
        """Before jobs are published: keeps them until no worker reads them."""
        if all(jobs is not each for each in self._published):
            jobs.belong_to(self.lock, self.head)
            self._published.append(jobs)
        if self.tracing is not None:
            self.tracing.published(jobs)

    def _failure(self, jobs: Jobs, status: int) -> TaskError:
        at, task = self._word[words.FAILED_JOB // 8], self._word[words.FAILED_TASK // 8]
        what = next((job.describe(task) for job in jobs.jobs if job.address == at), "a task")
        if status == words.LATE:
            what = f"{what}, for which the other device did not send its inputs in time,"
        if status == 0:
            what, task, status = "a routine that kernels call by its name", -1, raised.RAISED
        return TaskError(what, task, status, raised.take() if status == raised.RAISED else None)

    def _refuse_if_ended(self) -> None:
        self.refuse_in_child()
        if self.closed:
            raise PykernelsError("the worker pool is closed", "Make a new WorkerPool")

    @property
    def is_here(self) -> bool:
        """Whether its threads are this process's, and not those of its parent."""
        return os.getpid() == self._pid

    def refuse_in_child(self) -> None:
        """Raises PykernelsError in a forked child, which has none of the threads."""
        refuse_in_child(self._pid, "this worker pool")

    def close(self) -> None:
        """Waits for the batch in flight, then ends the workers. Safe to call twice."""
        if self.closed or os.getpid() != self._pid:
            return
        with self.lock:
            self.drain()
            self.closed = True
            words.stop(self.ring)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _worker_main(memory: np.ndarray, ring: int, worker: int) -> None:
    """A worker thread; it keeps the ring's memory alive."""
    words.worker_loop(ring, worker, 1)


_open: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open):
        pool.close()
