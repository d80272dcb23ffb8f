"""The workers' ring: a lock-free queue of jobs, published in order and run by all workers.

A *job* is one node of a step: ``setup`` returns its number of tasks, ``run`` executes one task. Its
record (``JOB_BYTES``, owned by the publisher) never moves and is published again every step; its
*number* is its position among all jobs that were ever published. Workers take jobs in order: a
worker takes tasks of a job until none is left, then goes on to the next job. So no worker idles at
the end of a job while the next one has tasks.

The first worker to reach a job whose predecessors are complete opens it. Its predecessors are the
jobs that it names by their distance (``AFTER``): any number of them, or none. Opening is serial and
short: sorting a router's choices, counting what there is to do. The words of a record carry the
job's number, so a worker that comes late, even when the record is already used again, sees that and
walks on. Nothing is ever reset by the publisher.

A job may be bound to a NUMA node (``NODE``): then that node's workers alone open it and take its
tasks, and the others walk past it. So the slices of a matrix are jobs beside each other, each read
by the cores that its memory is near to (SOSP'25 section 3.3). Every node has a worker.

A job may meet another device at flags, words in memory that both reach: it is opened when one is
not 0 (``WAIT_FOR``), and counts one up when it is complete, even if it failed (``SIGNAL``). Whoever
publishes the jobs clears the flags before. A flag that is not set in time (``LIMIT_NS``) is a
failure, and the jobs behind it wait no more, so no step lasts for ever.

Several batches may be in flight. The second one begins with a job that waits for the last of the
first (``fence``), and may be given up while it waits: workers walk past its jobs (``SKIPPED``).

Deadlock-free: a task only ever waits for tasks with lower numbers, which some worker has already
taken.

Everything here is ``nogil`` code on addresses, but for ``publish``.
"""

from __future__ import annotations

from numba import types

from pykernels.cpu.intrin.sync import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_task,
    clock_ns,
    futex_wait,
    futex_wake_all,
    pause,
)
from pykernels.cpu.jit import inlined, kernel

from . import spans
from .spans import record

LINE = 64

# Fields of the ring, each on its own cache line.
HEAD, STOP, SLEEPERS, FAILED = 0, 1 * LINE, 2 * LINE, 3 * LINE
STATUS, FAILED_JOB, FAILED_TASK = FAILED + 8, FAILED + 16, FAILED + 24
FAILED_NUMBER, SKIPPED = FAILED + 32, FAILED + 40
ENTRIES, MASK, SPIN_NS, PLACES = 4 * LINE, 4 * LINE + 8, 4 * LINE + 16, 4 * LINE + 24
DEADLINE, LIMIT_NS, TRACE = 4 * LINE + 32, 4 * LINE + 40, 4 * LINE + 48
RING_BYTES = 5 * LINE
WORKER_NODE = 8
"""``PLACES`` is the address of one cache line per worker, which holds its current job number and,
at ``WORKER_NODE``, its NUMA node counted from 1; jobs up to the number ``SKIPPED`` are not run if
they are not set up yet; ``DEADLINE`` is when the flags of the batch in
flight must be set, ``LIMIT_NS`` after publishing; ``TRACE`` the address of the memory that spans
are written to (``spans``), or 0."""

LATE = -110
"""Status of a job whose flag was not set in time."""

# Fields of a job: those that the publisher writes, then those of the workers.
SETUP, RUN, RECORD, AFTER, SETUP_AT, COMPLETED_AT, AFTER_COUNT = 0, 8, 16, 24, 32, 40, 48
NODE = 56
CLAIMED, READY, TASKS = 1 * LINE, 1 * LINE + 8, 1 * LINE + 16
WAIT_FOR, SIGNAL = 1 * LINE + 24, 1 * LINE + 32
TAKEN = 2 * LINE
DONE, COMPLETED = 3 * LINE, 3 * LINE + 8
JOB_BYTES = 4 * LINE
"""``AFTER`` is the address of int64 [AFTER_COUNT]: how many places before it each job stands that
must be complete before this one is opened. ``NODE``: the NUMA node that it is bound to, counted
from 1; 0: none. ``WAIT_FOR`` and ``SIGNAL`` are addresses of flags, 0 for none."""

_PAUSES = 16  # between two looks at the clock
_COUNT = 0xFFFFFFFF
_FOREVER = 1 << 62


@inlined
def wait_until_at_least(ring, word, value):  # type: ignore[no-untyped-def]
    """Spins, then sleeps, until the word reaches ``value``; at once if the ring stops."""
    now = atomic_load(word)
    if now >= value:
        return
    deadline = clock_ns() + atomic_load(ring + SPIN_NS)
    while clock_ns() < deadline:
        for _ in range(_PAUSES):
            now = atomic_load(word)
            if now >= value:
                return
            pause()
    atomic_add(ring + SLEEPERS, 1)
    now = atomic_load(word)
    while now < value and atomic_load(ring + STOP) == 0:
        futex_wait(word, now)
        now = atomic_load(word)
    atomic_add(ring + SLEEPERS, -1)


@inlined
def wait_as(ring, worker, job, number, word, value):  # type: ignore[no-untyped-def]
    """``wait_until_at_least`` as a worker, traced where the ring is.

    Args:
        job, number: that it waits for; 0: none of its own.
    """
    trace = atomic_load(ring + TRACE)
    if trace != 0 and atomic_load(word) >= value:
        trace = 0
    begin = clock_ns() if trace != 0 else 0
    wait_until_at_least(ring, word, value)
    if trace != 0:
        record(trace, worker, job, number, spans.WAIT, begin, clock_ns())


@inlined
def wake(ring, word):  # type: ignore[no-untyped-def]
    """Wakes the threads that sleep in ``wait_until_at_least`` on a word that has just changed."""
    if atomic_add(ring + SLEEPERS, 0) > 0:
        futex_wake_all(word)


@inlined
def _record_failure(ring, job, number, index, status):  # type: ignore[no-untyped-def]
    """Records the first failure since ``publish``; later ones are only counted."""
    if atomic_add(ring + FAILED, 1) == 0:
        atomic_store(ring + FAILED_JOB, job)
        atomic_store(ring + FAILED_NUMBER, number)
        atomic_store(ring + FAILED_TASK, index)
        atomic_store(ring + STATUS, status)


@inlined
def _complete(ring, job, number):  # type: ignore[no-untyped-def]
    atomic_store(job + COMPLETED_AT, clock_ns())
    if atomic_load(job + SIGNAL) != 0:
        atomic_add(atomic_load(job + SIGNAL), 1)
    atomic_store(job + COMPLETED, number)
    wake(ring, job + COMPLETED)


@inlined
def _poll(ring, job, number):  # type: ignore[no-untyped-def]
    """Spins until a job's flag is set, or it is late; at once if the ring stops."""
    flag, deadline = atomic_load(job + WAIT_FOR), atomic_load(ring + DEADLINE)
    while atomic_load(flag) == 0 and atomic_load(ring + STOP) == 0:
        for _ in range(_PAUSES):
            if atomic_load(flag) != 0:
                return
            pause()
        if clock_ns() > deadline:
            _record_failure(ring, job, number, -1, LATE)
            return


@inlined
def _setup(ring, job, number, worker):  # type: ignore[no-untyped-def]
    """Runs a job's setup, then makes its tasks available."""
    trace, begin = atomic_load(ring + TRACE), clock_ns()
    skipped = number <= atomic_load(ring + SKIPPED)
    if not skipped and atomic_load(job + WAIT_FOR) != 0:
        _poll(ring, job, number)
        if trace != 0:
            record(trace, worker, job, number, spans.WAIT, begin, clock_ns())
        begin = clock_ns()
    atomic_store(job + SETUP_AT, begin)
    tasks = atomic_load(job + TASKS)  # of a job without ``setup``
    if skipped:
        tasks = types.int64(0)
    elif atomic_load(job + SETUP) != 0:
        tasks = call_task(atomic_load(job + SETUP), atomic_load(job + RECORD), -1, worker)
        if tasks < 0:
            _record_failure(ring, job, number, -1, tasks)
            tasks = 0
        atomic_store(job + TASKS, tasks)
        if trace != 0:
            record(trace, worker, job, number, spans.SETUP, begin, clock_ns())
    atomic_store(job + DONE, 0)
    atomic_store(job + TAKEN, (number << 32) | tasks)
    atomic_store(job + READY, number)
    wake(ring, job + READY)
    if tasks == 0:
        _complete(ring, job, number)


@inlined
def _wait_for_setup(ring, job, number, worker):  # type: ignore[no-untyped-def]
    """Returns when the job is set up; runs its setup as soon as that may begin, unless another
    does."""
    entries, mask = atomic_load(ring + ENTRIES), atomic_load(ring + MASK)
    after = atomic_load(job + AFTER)
    for i in range(atomic_load(job + AFTER_COUNT)):
        needed = number - atomic_load(after + 8 * i)
        before = atomic_load(entries + 8 * (needed & mask))
        # The worker that completes the last one of them looks at this job next.
        wait_as(ring, worker, before, needed, before + COMPLETED, needed)
        if atomic_load(ring + STOP) != 0 or atomic_load(job + READY) >= number:
            return
    claimed = atomic_load(job + CLAIMED)
    if claimed < number and atomic_exchange(job + CLAIMED, claimed, number) == claimed:
        _setup(ring, job, number, worker)
    else:
        wait_as(ring, worker, job, number, job + READY, number)


@kernel("ring")
def work(ring: int, worker: int, number: int, until: int) -> int:
    """Runs jobs from ``number`` on, up to ``until``; returns the number where it stopped.

    A worker thread is one call with an ``until`` that is never reached.
    """
    entries, mask = atomic_load(ring + ENTRIES), atomic_load(ring + MASK)
    place = atomic_load(ring + PLACES) + worker * LINE
    mine = atomic_load(place + WORKER_NODE)
    while number < until:
        atomic_store(place, number)
        wait_as(ring, worker, 0, 0, ring + HEAD, number)
        if atomic_load(ring + STOP) != 0:
            return number
        job = atomic_load(entries + 8 * (number & mask))
        node = atomic_load(job + NODE)
        if node != 0 and node != mine:
            number += 1
            continue
        if atomic_load(job + READY) < number:
            _wait_for_setup(ring, job, number, worker)
        while True:
            taken = atomic_load(job + TAKEN)
            left = taken & _COUNT
            if left == 0 or (taken >> 32) & _COUNT != number & _COUNT:
                break
            if atomic_exchange(job + TAKEN, taken, taken - 1) != taken:
                continue
            tasks = atomic_load(job + TASKS)
            index = tasks - left
            run, args = atomic_load(job + RUN), atomic_load(job + RECORD)
            trace = atomic_load(ring + TRACE)
            begin = clock_ns() if trace != 0 else 0
            status = call_task(run, args, index, worker)
            if trace != 0:  # before it counts as done: a step that is over has all its spans
                record(trace, worker, job, number, index, begin, clock_ns())
            if status != 0:
                _record_failure(ring, job, number, index, status)
            if atomic_add(job + DONE, 1) + 1 == tasks:
                _complete(ring, job, number)
        number += 1
    return number


@inlined
def _publish(ring: int, jobs: int, count: int) -> int:
    """Publishes jobs; returns the number of the first.

    Args:
        jobs: address of int64 [count], the jobs' addresses. One thread at a time.
    """
    atomic_store(ring + DEADLINE, clock_ns() + atomic_load(ring + LIMIT_NS))
    first = atomic_load(ring + HEAD) + 1
    entries, mask = atomic_load(ring + ENTRIES), atomic_load(ring + MASK)
    for i in range(count):
        atomic_store(entries + 8 * ((first + i) & mask), atomic_load(jobs + 8 * i))
    atomic_store(ring + HEAD, first + count - 1)
    wake(ring, ring + HEAD)
    return first


@kernel("ring", nogil=False)
def publish_behind(ring: int, jobs: int, count: int) -> int:
    """``_publish`` of jobs that begin with a fence, while others may be in flight."""
    return _publish(ring, jobs, count)


@kernel("ring", nogil=False)  # else a thread that waits for the GIL takes it from who publishes
def publish(ring: int, jobs: int, count: int) -> int:
    """``_publish`` with the failure count reset; nothing else may be in flight."""
    atomic_store(ring + FAILED, 0)
    atomic_store(ring + STATUS, 0)
    return _publish(ring, jobs, count)


@inlined
def _finish(ring, jobs, count, first, driver_works):  # type: ignore[no-untyped-def]
    last = first + count - 1
    if driver_works:
        work(ring, types.int64(0), first, last + 1)
    job = atomic_load(jobs + 8 * (count - 1))
    if driver_works:
        wait_as(ring, types.int64(0), job, last, job + COMPLETED, last)
    else:
        wait_until_at_least(ring, job + COMPLETED, last)
    return atomic_load(ring + STATUS)


@kernel("ring")
def finish(ring: int, jobs: int, count: int, first: int, driver_works: bool) -> int:
    """Waits until the last of the jobs published from number ``first`` on is complete.

    Args:
        driver_works: whether the caller runs tasks too, as worker 0.

    Returns:
        the status of the first task that failed, or 0; ``STATUS`` and its neighbours say more.
    """
    return _finish(ring, jobs, count, first, driver_works)


@kernel("ring")
def run_step(ring: int, jobs: int, count: int, driver_works: bool) -> int:
    """``publish`` and ``finish`` in one."""
    atomic_store(ring + FAILED, 0)
    atomic_store(ring + STATUS, 0)
    first = _publish(ring, jobs, count)
    return _finish(ring, jobs, count, first, driver_works)


@kernel("ring")
def quiesce(ring: int, first: int, workers: int) -> None:
    """Waits until workers ``first .. workers - 1`` are past every published job, so that none of
    them reads the jobs' records again."""
    places, number = atomic_load(ring + PLACES), atomic_load(ring + HEAD)
    for worker in range(first, workers):
        while atomic_load(places + worker * LINE) <= number and atomic_load(ring + STOP) == 0:
            pause()


@kernel("ring")
def worker_loop(ring: int, worker: int, number: int) -> None:
    """A worker thread's life."""
    work(ring, worker, number, types.int64(_FOREVER))  # of a constant it is compiled anew


@kernel("ring")
def stop(ring: int) -> None:
    """Ends all workers, sleeping ones included; jobs that have not begun are dropped."""
    atomic_store(ring + STOP, 1)
    atomic_add(ring + HEAD, 1)  # else one who is about to sleep on it would not wake
    futex_wake_all(ring + HEAD)
