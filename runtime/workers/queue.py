"""The task queue of one fused MoE call, as the workers run it (SOSP'25 3.2; OSDI'26 3.5).

One queue holds all stages: the row tasks (a run of tokens each, if they are many), the pack tasks,
the gate-up tasks of the first active expert, of the second, ..., then the down tasks. A worker
takes the next one by decrementing one counter.

A down task owns a run of outputs and adds the experts in order; before each it waits at that
expert's barrier, which counts its finished gate-up tasks. Where there are many experts the run is
split over them (as serial split-K): first the first share of all runs, then the second shares,
which go on with the same sums. So every sum has one order, and only for the rows, which any expert
may read, does anybody wait for a whole stage.

No deadlock: whoever waits holds a later task than those it waits for, and row tasks wait for
nothing, so somebody is always working. The driver may wait for the rows too; it holds no task then.

Everything here is ``nogil`` code on addresses; ``worker_pool.py`` holds the threads,
``control_block.py`` the layout of what they share.
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

from . import control_block as block
from .counters import count

_ROWS, _PACK, _GATE_UP, _DOWN = range(4)

_PAUSES = 16  # between two looks at the clock


@inlined
def _wait_until_at_least(word: int, value: int, sleepers: int, spin_ns: int) -> None:
    """Spins, then sleeps, until the word reaches ``value``."""
    now = atomic_load(word)
    if now >= value:
        return
    deadline = clock_ns() + spin_ns
    while clock_ns() < deadline:
        for _ in range(_PAUSES):
            now = atomic_load(word)
            if now >= value:
                return
            pause()
    atomic_add(sleepers, 1)
    now = atomic_load(word)
    while now < value:
        futex_wait(word, now)
        now = atomic_load(word)
    atomic_add(sleepers, -1)


@inlined
def _note(control: int, status: int, stage: int, index: int) -> None:
    """Counts a failure; keeps the first."""
    if status != 0 and atomic_add(control + block.FAILURES, 1) == 0:
        atomic_store(control + block.FAILED_STAGE, stage)
        atomic_store(control + block.FAILED_INDEX, index)
        atomic_store(control + block.STATUS, status)


@inlined
def _arrive(control: int, barrier: int, expected: int) -> None:
    """Counts one task at a barrier; the last one opens it."""
    if atomic_add(barrier, 1) + 1 == expected and atomic_add(control + block.WAITERS, 0) > 0:
        futex_wake_all(barrier)


@inlined
def _rows(control: int, index: int, worker: int) -> None:
    function, job = atomic_load(control + block.ROWS), atomic_load(control + block.JOB)
    _note(control, call_task(function, job, index, worker), _ROWS, index)
    _arrive(control, control + block.ROWS_DONE, atomic_load(control + block.ROW_TASKS))


@inlined
def _wait_for_rows(control: int, spin_ns: int) -> None:
    rows = atomic_load(control + block.ROW_TASKS)
    _wait_until_at_least(control + block.ROWS_DONE, rows, control + block.WAITERS, spin_ns)


@inlined
def _pack(control: int, piece: int, worker: int, spin_ns: int) -> None:
    _wait_for_rows(control, spin_ns)
    function, job = atomic_load(control + block.PACK), atomic_load(control + block.JOB)
    _note(control, call_task(function, job, piece, worker), _PACK, piece)
    active = atomic_load(atomic_load(control + block.PIECE_ACTIVE) + 8 * piece)
    barrier = atomic_load(control + block.BARRIERS) + active * block.BARRIER_BYTES
    _arrive(control, barrier, atomic_load(atomic_load(control + block.PIECES) + 8 * active))


@inlined
def _gate_up(control: int, index: int, worker: int, spin_ns: int) -> None:
    _wait_for_rows(control, spin_ns)
    function, job = atomic_load(control + block.GATE_UP), atomic_load(control + block.JOB)
    active, chunks = atomic_load(control + block.ACTIVE), atomic_load(control + block.I_CHUNKS)
    packed = atomic_load(control + block.BARRIERS) + index // chunks * block.BARRIER_BYTES
    if atomic_load(control + block.PACK_TASKS) > 0:
        pieces = atomic_load(atomic_load(control + block.PIECES) + 8 * (index // chunks))
        _wait_until_at_least(packed, pieces, control + block.WAITERS, spin_ns)
    _note(control, call_task(function, job, index, worker), _GATE_UP, index)
    _arrive(control, packed + active * block.BARRIER_BYTES, chunks)


@inlined
def _down(control: int, index: int, worker: int, spin_ns: int) -> None:
    function, job = atomic_load(control + block.DOWN), atomic_load(control + block.JOB)
    active, i_chunks = atomic_load(control + block.ACTIVE), atomic_load(control + block.I_CHUNKS)
    chunks = atomic_load(control + block.DOWN_CHUNKS)
    splits = atomic_load(control + block.DOWN_SPLITS)
    split, chunk = index // chunks, index % chunks
    gated = atomic_load(control + block.BARRIERS) + active * block.BARRIER_BYTES
    splits_done = gated + (active + chunk) * block.BARRIER_BYTES
    if split > 0:
        _wait_until_at_least(splits_done, split, control + block.WAITERS, spin_ns)
    for expert in range(active * split // splits, active * (split + 1) // splits):
        barrier = gated + expert * block.BARRIER_BYTES
        _wait_until_at_least(barrier, i_chunks, control + block.WAITERS, spin_ns)
        task = chunk * active + expert
        _note(control, call_task(function, job, task, worker), _DOWN, task)
    if splits > 1:
        _arrive(control, splits_done, split + 1)


@inlined
def _count_done(control: int, tasks: int) -> None:
    """Counts a finished task; the last one ends the call."""
    if atomic_add(control + block.DONE, 1) + 1 == tasks:
        atomic_store(control + block.FINISHED_AT, clock_ns())
        # DONE passes ``tasks`` only now, after the clock was read: the driver waits for that.
        atomic_add(control + block.DONE, 1)
        if atomic_add(control + block.DRIVER_SLEEPS, 0) > 0:
            futex_wake_all(control + block.DONE)


@kernel()
def work(control: int, worker: int) -> None:
    """Takes and runs tasks until none is left to take.

    A late look at REMAINING is harmless: below zero it means nothing, and above zero the task is
    one of the current call, whose words were all written before it.
    """
    spin_ns = atomic_load(control + block.SPIN_NS)
    while True:
        left = atomic_add(control + block.REMAINING, -1)
        if left <= 0:
            return
        tasks, rows = atomic_load(control + block.TASKS), atomic_load(control + block.ROW_TASKS)
        packs = atomic_load(control + block.PACK_TASKS)
        gate_ups = atomic_load(control + block.GATE_UP_TASKS)
        index = tasks - left - rows
        if index < 0:
            _rows(control, index + rows, worker)
        elif index < packs:
            _pack(control, index, worker, spin_ns)
        elif index < packs + gate_ups:
            _gate_up(control, index - packs, worker, spin_ns)
        else:
            _down(control, index - packs - gate_ups, worker, spin_ns)
        _count_done(control, tasks)


@kernel()
def worker_loop(control: int, worker: int) -> None:
    """A worker's life: work, spin a while for the next call, sleep; until ``stop``."""
    spin_ns = atomic_load(control + block.SPIN_NS)
    epoch = 0
    while atomic_load(control + block.STOP) == 0:
        _wait_until_at_least(control + block.EPOCH, epoch + 1, control + block.SLEEPERS, spin_ns)
        epoch = atomic_load(control + block.EPOCH)
        work(control, worker)


@inlined
def _wake_workers(control: int) -> None:
    atomic_add(control + block.EPOCH, 1)
    if atomic_add(control + block.SLEEPERS, 0) > 0:
        futex_wake_all(control + block.EPOCH)


@kernel()
def change_state(control: int, state: int, to: int) -> int:
    """Changes the pool's state from ``state``, if it is that; returns what it was."""
    return atomic_exchange(control + block.STATE, state, to)


@kernel()
def hand_out(control: int, thread: int) -> int:
    """The caller of ``start`` has the call's number from now on: Ctrl-C does not lose it."""
    return atomic_exchange(control + block.STARTER, thread, 0)


@inlined
def open_call(
    control: int,
    thread: int,
    gate_up: int,
    down: int,
    job: int,
    active: int,
    i_chunks: int,
    down_chunks: int,
    down_splits: int,
    pack: int,
    pack_tasks: int,
    piece_active: int,
    pieces: int,
    rows: int,
    row_tasks: int,
    experts: int,
) -> int:
    """Publishes a call to the workers; the pool is LAUNCHING and has the barriers it needs.

    The caller sets the state after that: from then on another thread may end the call, and a third
    one open the next.

    Args:
        thread: the caller's.

    Returns:
        the call's number, from 1.
    """
    barriers = atomic_load(control + block.BARRIERS)
    for i in range(2 * active + (down_chunks if down_splits > 1 else 0)):
        atomic_store(barriers + i * block.BARRIER_BYTES, 0)
    atomic_store(control + block.GATE_UP, gate_up)
    atomic_store(control + block.DOWN, down)
    atomic_store(control + block.JOB, job)
    atomic_store(control + block.ACTIVE, active)
    atomic_store(control + block.I_CHUNKS, i_chunks)
    atomic_store(control + block.GATE_UP_TASKS, active * i_chunks)
    atomic_store(control + block.DOWN_CHUNKS, down_chunks)
    atomic_store(control + block.DOWN_SPLITS, down_splits)
    atomic_store(control + block.PACK, pack)
    atomic_store(control + block.PACK_TASKS, pack_tasks)
    atomic_store(control + block.PIECE_ACTIVE, piece_active)
    atomic_store(control + block.PIECES, pieces)
    atomic_store(control + block.ROWS, rows)
    atomic_store(control + block.ROW_TASKS, row_tasks)
    atomic_store(control + block.EXPERTS, experts)
    atomic_store(control + block.ROWS_DONE, 0)
    tasks = row_tasks + pack_tasks + active * i_chunks + down_chunks * down_splits
    atomic_store(control + block.TASKS, tasks)
    atomic_store(control + block.STATUS, 0)
    atomic_store(control + block.FAILURES, 0)
    now = clock_ns()
    atomic_store(control + block.STARTED_AT, now)
    atomic_store(control + block.FINISHED_AT, now)
    atomic_store(control + block.DONE, 0 if tasks > 0 else 1)
    atomic_store(control + block.STARTER, thread)
    number = atomic_load(control + block.EPOCH) + 1
    atomic_store(control + block.REMAINING, tasks)
    _wake_workers(control)
    return number


@kernel()
def publish(control: int, thread: int, call: tuple[int, ...]) -> int:
    """``open_call``, from Python; ``call`` has its other arguments.

    Returns:
        the call's number; or NOT_RUNNING: the pool is not claimed by ``thread``.
    """
    if atomic_exchange(control + block.STATE, thread, block.LAUNCHING) != thread:
        return block.NOT_RUNNING
    number = open_call(control, thread, *call)
    atomic_store(control + block.STATE, block.RUNS - number)
    return number


@kernel()
def finish_rows(control: int, call: int, driver_works: bool) -> bool:
    """Waits until all rows are there, working along if the driver is of the pool, on rows only.

    Returns:
        whether it has; not if the call does not run, or another thread drives it.
    """
    if atomic_exchange(control + block.STATE, block.RUNS - call, block.DRIVEN) != block.RUNS - call:
        return False
    tasks, rows = atomic_load(control + block.TASKS), atomic_load(control + block.ROW_TASKS)
    while driver_works:
        left = atomic_load(control + block.REMAINING)
        if tasks - left >= rows:
            break
        if atomic_exchange(control + block.REMAINING, left, left - 1) == left:
            _rows(control, tasks - left, 0)
            _count_done(control, tasks)
    _wait_for_rows(control, atomic_load(control + block.SPIN_NS))
    atomic_store(control + block.STATE, block.RUNS - call)
    return True


@inlined
def _record(control: int, call: int, status: int) -> None:
    """Keeps what a failed call's ``TaskError`` says, while no other call can begin.

    FAILED_CALL is written first and only grows: a thread that reads the LAST words and finds the
    same FAILED_CALL before and after them knows that they are of that call.
    """
    stage = atomic_load(control + block.FAILED_STAGE)
    index = atomic_load(control + block.FAILED_INDEX)
    active, expert = -1, -1
    if stage == _PACK:
        active = atomic_load(atomic_load(control + block.PIECE_ACTIVE) + 8 * index)
    elif stage == _GATE_UP:
        active = index // atomic_load(control + block.I_CHUNKS)
    elif stage == _DOWN:
        active = index % atomic_load(control + block.ACTIVE)
    if active >= 0 and atomic_load(control + block.EXPERTS) != 0:
        expert = atomic_load(atomic_load(control + block.EXPERTS) + 8 * active)
    atomic_store(control + block.FAILED_CALL, call)
    atomic_store(control + block.LAST_STATUS, status)
    atomic_store(control + block.LAST_STAGE, stage)
    atomic_store(control + block.LAST_INDEX, index)
    atomic_store(control + block.LAST_ACTIVE, active)
    atomic_store(control + block.LAST_STARTED, atomic_load(control + block.STARTED_AT))
    atomic_store(control + block.LAST_FINISHED, atomic_load(control + block.FINISHED_AT))
    atomic_store(control + block.LAST_EXPERT, expert)


@inlined
def _drive(
    control: int, call: int, driver_works: bool, counters: int, tokens: int, nbytes: int
) -> int:
    """Waits for a call to end, and frees the pool, which is DRIVEN; as ``finish``."""
    if driver_works:
        work(control, 0)
    tasks = atomic_load(control + block.TASKS)
    _wait_until_at_least(
        control + block.DONE,
        tasks + 1,
        control + block.DRIVER_SLEEPS,
        atomic_load(control + block.SPIN_NS),
    )
    status = atomic_load(control + block.STATUS)
    if status == 0 and counters != 0:
        took = atomic_load(control + block.FINISHED_AT) - atomic_load(control + block.STARTED_AT)
        count(counters, tokens, nbytes, took)
    if status != 0:
        _record(control, call, status)
    atomic_store(control + block.STATE, block.FREE)
    return status


@kernel()
def finish(
    control: int, call: int, driver_works: bool, counters: int, tokens: int, nbytes: int
) -> int:
    """Waits for a call to end, working along if the driver is of the pool; frees the pool.

    Only one thread may: two would both be worker 0, which has one scratch, and the slower one would
    wait on the words of the next call.

    Args:
        counters: address of the ``Counters`` that count it, if no task fails; 0: none.

    Returns:
        the call's status; or NOT_RUNNING: it has ended, or another thread drives it.
    """
    if atomic_exchange(control + block.STATE, block.RUNS - call, block.DRIVEN) != block.RUNS - call:
        return block.NOT_RUNNING
    return _drive(control, call, driver_works, counters, tokens, nbytes)


@kernel()
def run(control: int, thread: int, driver_works: bool, call: tuple[int, ...]) -> tuple[int, int]:
    """``publish`` and ``finish`` in one, so that Ctrl-C cannot come in between and free buffers
    that the tasks use.

    Returns:
        the call's number and its status; or 0 and NOT_RUNNING, as ``publish``.
    """
    if atomic_exchange(control + block.STATE, thread, block.LAUNCHING) != thread:
        return 0, block.NOT_RUNNING
    number = open_call(control, thread, *call)
    atomic_store(control + block.STATE, block.DRIVEN)
    return number, _drive(control, number, driver_works, 0, 0, 0)


@kernel()
def stop(control: int) -> None:
    """Tells the workers to leave."""
    atomic_store(control + block.STOP, 1)
    _wake_workers(control)


def compile_all() -> None:
    """Compiles (or loads from the cache) what a pool calls."""
    for function, arguments in (
        (worker_loop, 2),
        (change_state, 3),
        (hand_out, 2),
        (stop, 1),
    ):
        function.compile((types.int64,) * arguments)
    call = types.UniTuple(types.int64, 14)
    publish.compile((types.int64, types.int64, call))
    finish_rows.compile((types.int64, types.int64, types.boolean))
    finish.compile((types.int64, types.int64, types.boolean, *[types.int64] * 3))
    run.compile((types.int64, types.int64, types.boolean, call))
