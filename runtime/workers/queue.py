"""The task queue of one fused MoE call, as the workers run it (SOSP'25 3.2; OSDI'26 3.5).

One queue holds all stages: the row tasks (a run of tokens each, if they are many), the pack tasks,
the gate-up tasks of the first active expert, of the second, ..., then the down tasks. A worker
takes the next one by decrementing one counter. A down task owns a run of outputs and walks the
experts in order; before each it waits at that expert's barrier, which counts the expert's finished
gate-up tasks. Where that walk is long it is a relay of several legs, each a task: the first legs of
all runs, then the second ones, which go on with the sums of the first. So only for the rows, which
any expert may read, does anybody wait for a whole stage; every sum has one order; and since whoever
waits holds a later task than those it waits for, and row tasks wait for nothing, somebody is always
working. The driver may wait for the rows too: it holds no task then.

The control block is int64 words, each thread-shared one on a cache line of its own. Everything here
is ``nogil`` code on addresses; ``workers.py`` holds the threads.
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

from .counters import count

_LINE = 64

# Shared words: byte offsets into the control block.
EPOCH = 0 * _LINE  # counts calls; workers sleep on it
REMAINING = 1 * _LINE  # tasks not taken yet; zero or below: none
DONE = 2 * _LINE  # tasks finished; the driver sleeps on it
SLEEPERS = 3 * _LINE  # workers asleep, or about to be
DRIVER_SLEEPS = 4 * _LINE
WAITERS = 5 * _LINE  # workers asleep at a barrier, or about to be
STATUS = 6 * _LINE  # first status other than 0 that a task returned
FAILURES = STATUS + 8  # tasks that failed
FAILED_STAGE = STATUS + 16  # stage and index of the first of them
FAILED_INDEX = STATUS + 24
STOP = 7 * _LINE
FINISHED_AT = 8 * _LINE  # clock when the last task ended
ROWS_DONE = 9 * _LINE  # row tasks finished: the barrier of all that read rows

# Words of the current call: written by the driver before REMAINING, read by whoever holds a task.
GATE_UP = 10 * _LINE
DOWN = GATE_UP + 8
JOB = GATE_UP + 16
TASKS = GATE_UP + 24
GATE_UP_TASKS = GATE_UP + 32
I_CHUNKS = GATE_UP + 40  # gate-up tasks of one expert
ACTIVE = GATE_UP + 48  # experts
BARRIERS = GATE_UP + 56  # address of counters, a cache line each: [2, ACTIVE] packed and gated,
# and with several legs [DOWN_CHUNKS] of those done
PACK = GATE_UP + 64
PACK_TASKS = GATE_UP + 72
PIECE_ACTIVE = GATE_UP + 80  # address of int64 [PACK_TASKS]: the active expert of each pack task
PIECES = GATE_UP + 88  # address of int64 [ACTIVE]: pack tasks of each active expert
ROWS = GATE_UP + 96
ROW_TASKS = GATE_UP + 104
DOWN_CHUNKS = GATE_UP + 112  # runs of outputs
LEGS = GATE_UP + 120  # down tasks of each

SPIN_NS = 12 * _LINE
STARTED_AT = SPIN_NS + 8
STATE = SPIN_NS + 16  # who has the pool: one of the below, or the thread that prepares a call
INSIDE = SPIN_NS + 24  # the thread that has started the call and told nobody yet; 0: it has
FAILED_CALL = SPIN_NS + 32  # number of the last call of which a task failed
EXPERTS = SPIN_NS + 40  # of the current call: address of int64 [ACTIVE], the experts' numbers in
# their layer; 0: it is no layer's
LAST = 13 * _LINE  # of the call FAILED_CALL, written before the pool is freed:
LAST_STATUS = LAST
LAST_STAGE = LAST + 8
LAST_INDEX = LAST + 16
LAST_ACTIVE = LAST + 24  # the active expert that the task was for; -1: rows are all's
LAST_STARTED = LAST + 32
LAST_FINISHED = LAST + 40
LAST_EXPERT = LAST + 48  # the number of that expert; -1: none
CONTROL_BYTES = 14 * _LINE
BARRIER_BYTES = _LINE

# The states of a pool, and who may make each step, by one exchange from the state that it saw:
#
#   FREE ----> id ----> LAUNCHING ----> RUNS - n <----> DRIVEN ----> FREE
#     1. FREE -> id: any thread, its own id (``Control.claim``), and back (``release``). From the id
#        of a thread that has ended, also any thread, to its own.
#     2. id -> LAUNCHING: the thread of this id. FREE -> LAUNCHING: any thread, for a call that is
#        arranged (``launch.launch``). Back to either: who made the step, where nothing is begun.
#     3. LAUNCHING -> RUNS - n: who made step 2; or at once -> DRIVEN (``run``).
#     4. RUNS - n -> DRIVEN: any thread that waits for call n. Back: the same one, where it waited
#        for rows alone.
#     5. DRIVEN -> FREE: who made the step to DRIVEN, when all tasks have ended.
#   FREE or id -> CLOSED: any thread (``WorkerPool.close``); it stays so.
#   any -> FORKED: a forked child, in its own copy; it stays so.
FREE, LAUNCHING, DRIVEN, CLOSED, FORKED = 0, -1, -2, -3, -4
"""DRIVEN: a thread works on the running call or waits for it, and no other may meanwhile."""
RUNS = -8
"""RUNS - n: the call of number n runs. So who ends a call never ends a later one instead."""
NOT_RUNNING = -(1 << 62)
"""What is returned in place of a status."""

STAGES = ("rows", "pack", "gate-up", "down")
"""What the numbers in FAILED_STAGE stand for."""
_ROWS, _PACK, _GATE_UP, _DOWN = range(4)

_PAUSES = 16  # between two looks at the clock


@inlined
def _wait_until_at_least(word: int, value: int, sleepers: int, spin_ns: int) -> None:
    """Spins, then sleeps, until the word reaches ``value``."""
    seen = atomic_load(word)
    if seen >= value:
        return
    deadline = clock_ns() + spin_ns
    while clock_ns() < deadline:
        for _ in range(_PAUSES):
            seen = atomic_load(word)
            if seen >= value:
                return
            pause()
    atomic_add(sleepers, 1)
    seen = atomic_load(word)
    while seen < value:
        futex_wait(word, seen)
        seen = atomic_load(word)
    atomic_add(sleepers, -1)


@inlined
def _note(control: int, status: int, stage: int, index: int) -> None:
    """Keeps the first failure."""
    if status != 0 and atomic_add(control + FAILURES, 1) == 0:
        atomic_store(control + FAILED_STAGE, stage)
        atomic_store(control + FAILED_INDEX, index)
        atomic_store(control + STATUS, status)


@inlined
def _arrive(control: int, barrier: int, expected: int) -> None:
    """Counts one task at a barrier; the last one opens it."""
    if atomic_add(barrier, 1) + 1 == expected and atomic_add(control + WAITERS, 0) > 0:
        futex_wake_all(barrier)


@inlined
def _rows(control: int, index: int, worker: int) -> None:
    function, job = atomic_load(control + ROWS), atomic_load(control + JOB)
    _note(control, call_task(function, job, index, worker), _ROWS, index)
    _arrive(control, control + ROWS_DONE, atomic_load(control + ROW_TASKS))


@inlined
def _wait_for_rows(control: int, spin_ns: int) -> None:
    rows = atomic_load(control + ROW_TASKS)
    _wait_until_at_least(control + ROWS_DONE, rows, control + WAITERS, spin_ns)


@inlined
def _pack(control: int, piece: int, worker: int, spin_ns: int) -> None:
    _wait_for_rows(control, spin_ns)
    function, job = atomic_load(control + PACK), atomic_load(control + JOB)
    _note(control, call_task(function, job, piece, worker), _PACK, piece)
    active = atomic_load(atomic_load(control + PIECE_ACTIVE) + 8 * piece)
    barrier = atomic_load(control + BARRIERS) + active * BARRIER_BYTES
    _arrive(control, barrier, atomic_load(atomic_load(control + PIECES) + 8 * active))


@inlined
def _gate_up(control: int, index: int, worker: int, spin_ns: int) -> None:
    _wait_for_rows(control, spin_ns)
    function, job = atomic_load(control + GATE_UP), atomic_load(control + JOB)
    active, chunks = atomic_load(control + ACTIVE), atomic_load(control + I_CHUNKS)
    packed = atomic_load(control + BARRIERS) + index // chunks * BARRIER_BYTES
    if atomic_load(control + PACK_TASKS) > 0:
        pieces = atomic_load(atomic_load(control + PIECES) + 8 * (index // chunks))
        _wait_until_at_least(packed, pieces, control + WAITERS, spin_ns)
    _note(control, call_task(function, job, index, worker), _GATE_UP, index)
    _arrive(control, packed + active * BARRIER_BYTES, chunks)


@inlined
def _down(control: int, index: int, worker: int, spin_ns: int) -> None:
    function, job = atomic_load(control + DOWN), atomic_load(control + JOB)
    active, i_chunks = atomic_load(control + ACTIVE), atomic_load(control + I_CHUNKS)
    chunks, legs = atomic_load(control + DOWN_CHUNKS), atomic_load(control + LEGS)
    leg, chunk = index // chunks, index % chunks
    gated = atomic_load(control + BARRIERS) + active * BARRIER_BYTES
    relay = gated + (active + chunk) * BARRIER_BYTES
    if leg > 0:
        _wait_until_at_least(relay, leg, control + WAITERS, spin_ns)
    for expert in range(active * leg // legs, active * (leg + 1) // legs):
        barrier = gated + expert * BARRIER_BYTES
        _wait_until_at_least(barrier, i_chunks, control + WAITERS, spin_ns)
        task = chunk * active + expert
        _note(control, call_task(function, job, task, worker), _DOWN, task)
    if legs > 1:
        _arrive(control, relay, leg + 1)


@inlined
def _count_done(control: int, tasks: int) -> None:
    """Counts a finished task; the last one ends the call."""
    if atomic_add(control + DONE, 1) + 1 == tasks:
        atomic_store(control + FINISHED_AT, clock_ns())
        # DONE passes ``tasks`` only now, after the clock was read: the driver waits for that.
        atomic_add(control + DONE, 1)
        if atomic_add(control + DRIVER_SLEEPS, 0) > 0:
            futex_wake_all(control + DONE)


@kernel()
def work(control: int, worker: int) -> None:
    """Takes and runs tasks until none is left to take.

    A late look at REMAINING is harmless: below zero it means nothing, and above zero the task is
    one of the current call, whose words were all written before it.
    """
    spin_ns = atomic_load(control + SPIN_NS)
    while True:
        left = atomic_add(control + REMAINING, -1)
        if left <= 0:
            return
        tasks, rows = atomic_load(control + TASKS), atomic_load(control + ROW_TASKS)
        packs, gate_ups = atomic_load(control + PACK_TASKS), atomic_load(control + GATE_UP_TASKS)
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
    """A worker's life: work, spin a while for the next call, sleep, until told to stop."""
    spin_ns = atomic_load(control + SPIN_NS)
    seen = 0
    while atomic_load(control + STOP) == 0:
        _wait_until_at_least(control + EPOCH, seen + 1, control + SLEEPERS, spin_ns)
        seen = atomic_load(control + EPOCH)
        work(control, worker)


@inlined
def _wake_workers(control: int) -> None:
    atomic_add(control + EPOCH, 1)
    if atomic_add(control + SLEEPERS, 0) > 0:
        futex_wake_all(control + EPOCH)


@kernel()
def turn(control: int, state: int, to: int) -> int:
    """Changes the pool's state from ``state``, if it is that; returns what it was."""
    return atomic_exchange(control + STATE, state, to)


@kernel()
def hand_out(control: int, thread: int) -> int:
    """The call that the thread has started is told of, if INSIDE still says its name."""
    return atomic_exchange(control + INSIDE, thread, 0)


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
    legs: int,
    pack: int,
    pack_tasks: int,
    piece_active: int,
    pieces: int,
    rows: int,
    row_tasks: int,
    experts: int,
) -> int:
    """Opens a call to the workers; the pool is LAUNCHING, with the barriers that it needs.

    What the pool's state is then the caller says, last: from there on another thread may end the
    call, and a third one open the next.

    Args:
        thread: the caller's.

    Returns:
        the call's number, from 1.
    """
    barriers = atomic_load(control + BARRIERS)
    for i in range(2 * active + (down_chunks if legs > 1 else 0)):
        atomic_store(barriers + i * BARRIER_BYTES, 0)
    atomic_store(control + GATE_UP, gate_up)
    atomic_store(control + DOWN, down)
    atomic_store(control + JOB, job)
    atomic_store(control + ACTIVE, active)
    atomic_store(control + I_CHUNKS, i_chunks)
    atomic_store(control + GATE_UP_TASKS, active * i_chunks)
    atomic_store(control + DOWN_CHUNKS, down_chunks)
    atomic_store(control + LEGS, legs)
    atomic_store(control + PACK, pack)
    atomic_store(control + PACK_TASKS, pack_tasks)
    atomic_store(control + PIECE_ACTIVE, piece_active)
    atomic_store(control + PIECES, pieces)
    atomic_store(control + ROWS, rows)
    atomic_store(control + ROW_TASKS, row_tasks)
    atomic_store(control + EXPERTS, experts)
    atomic_store(control + ROWS_DONE, 0)
    tasks = row_tasks + pack_tasks + active * i_chunks + down_chunks * legs
    atomic_store(control + TASKS, tasks)
    atomic_store(control + STATUS, 0)
    atomic_store(control + FAILURES, 0)
    now = clock_ns()
    atomic_store(control + STARTED_AT, now)
    atomic_store(control + FINISHED_AT, now)
    atomic_store(control + DONE, 0 if tasks > 0 else 1)
    atomic_store(control + INSIDE, thread)
    number = atomic_load(control + EPOCH) + 1
    atomic_store(control + REMAINING, tasks)
    _wake_workers(control)
    return number


@kernel()
def publish(control: int, thread: int, call: tuple[int, ...]) -> int:
    """``open_call``, from Python; ``call`` has its other arguments.

    Returns:
        the call's number; or NOT_RUNNING: the pool is not claimed by ``thread``.
    """
    if atomic_exchange(control + STATE, thread, LAUNCHING) != thread:
        return NOT_RUNNING
    number = open_call(control, thread, *call)
    atomic_store(control + STATE, RUNS - number)
    return number


@kernel()
def finish_rows(control: int, call: int, driver_works: bool) -> bool:
    """Waits until all rows are there, working along if the driver is of the pool, on rows only.

    Returns:
        whether it has; not if the call does not run, or another thread drives it.
    """
    if atomic_exchange(control + STATE, RUNS - call, DRIVEN) != RUNS - call:
        return False
    tasks, rows = atomic_load(control + TASKS), atomic_load(control + ROW_TASKS)
    while driver_works:
        left = atomic_load(control + REMAINING)
        if tasks - left >= rows:
            break
        if atomic_exchange(control + REMAINING, left, left - 1) == left:
            _rows(control, tasks - left, 0)
            _count_done(control, tasks)
    _wait_for_rows(control, atomic_load(control + SPIN_NS))
    atomic_store(control + STATE, RUNS - call)
    return True


@inlined
def _record(control: int, call: int, status: int) -> None:
    """What of a failure is told, while no other call can begin.

    FAILED_CALL first, and it only grows: who reads of an earlier call, at any time, sees that it or
    a later one failed; and who finds the same FAILED_CALL again behind the LAST words, that those
    are its call's.
    """
    stage, index = atomic_load(control + FAILED_STAGE), atomic_load(control + FAILED_INDEX)
    active, expert = -1, -1
    if stage == _PACK:
        active = atomic_load(atomic_load(control + PIECE_ACTIVE) + 8 * index)
    elif stage == _GATE_UP:
        active = index // atomic_load(control + I_CHUNKS)
    elif stage == _DOWN:
        active = index % atomic_load(control + ACTIVE)
    if active >= 0 and atomic_load(control + EXPERTS) != 0:
        expert = atomic_load(atomic_load(control + EXPERTS) + 8 * active)
    atomic_store(control + FAILED_CALL, call)
    atomic_store(control + LAST_STATUS, status)
    atomic_store(control + LAST_STAGE, stage)
    atomic_store(control + LAST_INDEX, index)
    atomic_store(control + LAST_ACTIVE, active)
    atomic_store(control + LAST_STARTED, atomic_load(control + STARTED_AT))
    atomic_store(control + LAST_FINISHED, atomic_load(control + FINISHED_AT))
    atomic_store(control + LAST_EXPERT, expert)


@inlined
def _drive(
    control: int, call: int, driver_works: bool, counters: int, tokens: int, nbytes: int
) -> int:
    """Waits for a call to end, and frees the pool, which is DRIVEN; as ``finish``."""
    if driver_works:
        work(control, 0)
    tasks = atomic_load(control + TASKS)
    _wait_until_at_least(
        control + DONE, tasks + 1, control + DRIVER_SLEEPS, atomic_load(control + SPIN_NS)
    )
    status = atomic_load(control + STATUS)
    if status == 0 and counters != 0:
        took = atomic_load(control + FINISHED_AT) - atomic_load(control + STARTED_AT)
        count(counters, tokens, nbytes, took)
    if status != 0:
        _record(control, call, status)
    atomic_store(control + STATE, FREE)
    return status


@kernel()
def finish(
    control: int, call: int, driver_works: bool, counters: int, tokens: int, nbytes: int
) -> int:
    """Waits for a call to end, working along if the driver is of the pool; frees the pool.

    Only one thread may: two would both be worker 0, which has one scratch, and the slower one would
    wait on the words of the next call.

    Args:
        counters: address of what counts it, as so many tokens and bytes, if no task fails; 0: none.

    Returns:
        the call's status; or NOT_RUNNING: it has ended, or another thread drives it.
    """
    if atomic_exchange(control + STATE, RUNS - call, DRIVEN) != RUNS - call:
        return NOT_RUNNING
    return _drive(control, call, driver_works, counters, tokens, nbytes)


@kernel()
def run(control: int, thread: int, driver_works: bool, call: tuple[int, ...]) -> tuple[int, int]:
    """``publish`` and ``finish`` in one: no Ctrl-C comes between, to free what the tasks use.

    Returns:
        the call's number and its status; or 0 and NOT_RUNNING, as ``publish``.
    """
    if atomic_exchange(control + STATE, thread, LAUNCHING) != thread:
        return 0, NOT_RUNNING
    number = open_call(control, thread, *call)
    atomic_store(control + STATE, DRIVEN)
    return number, _drive(control, number, driver_works, 0, 0, 0)


@kernel()
def stop(control: int) -> None:
    """Tells the workers to leave."""
    atomic_store(control + STOP, 1)
    _wake_workers(control)


def compile_all() -> None:
    """Compiles (or loads from the cache) what a pool calls."""
    for function, arguments in (
        (worker_loop, 2),
        (turn, 3),
        (hand_out, 2),
        (stop, 1),
    ):
        function.compile((types.int64,) * arguments)
    call = types.UniTuple(types.int64, 14)
    publish.compile((types.int64, types.int64, call))
    finish_rows.compile((types.int64, types.int64, types.boolean))
    finish.compile((types.int64, types.int64, types.boolean, *[types.int64] * 3))
    run.compile((types.int64, types.int64, types.boolean, call))
