"""The control block of a pool: int64 words that the driver and the workers share.

Byte offsets into the block. A word that several threads write has a cache line of its own.
"""

from __future__ import annotations

_LINE = 64

# Shared words.
EPOCH = 0 * _LINE  # counts calls; idle workers sleep on it
REMAINING = 1 * _LINE  # tasks that nobody has taken yet; zero or below: none
DONE = 2 * _LINE  # tasks finished; the driver sleeps on it
SLEEPERS = 3 * _LINE  # workers asleep, or about to be
DRIVER_SLEEPS = 4 * _LINE
WAITERS = 5 * _LINE  # threads asleep at a barrier, or about to be
STATUS = 6 * _LINE  # first status other than 0 that a task returned
FAILURES = STATUS + 8  # tasks that failed
FAILED_STAGE = STATUS + 16  # stage and index of the first of them
FAILED_INDEX = STATUS + 24
STOP = 7 * _LINE
FINISHED_AT = 8 * _LINE  # clock when the last task ended
ROWS_DONE = 9 * _LINE  # row tasks finished: the barrier before all that reads rows

# The current call: written by the driver before REMAINING, read by whoever holds a task.
GATE_UP = 10 * _LINE
DOWN = GATE_UP + 8
JOB = GATE_UP + 16
TASKS = GATE_UP + 24
GATE_UP_TASKS = GATE_UP + 32
I_CHUNKS = GATE_UP + 40  # gate-up tasks of one expert
ACTIVE = GATE_UP + 48  # experts
BARRIERS = GATE_UP + 56  # address of counters, a cache line each: [2, ACTIVE] pack tasks and
# gate-up tasks done of each expert, and if DOWN_SPLITS > 1 [DOWN_CHUNKS] splits done
PACK = GATE_UP + 64
PACK_TASKS = GATE_UP + 72
PIECE_ACTIVE = GATE_UP + 80  # address of int64 [PACK_TASKS]: the active expert of each pack task
PIECES = GATE_UP + 88  # address of int64 [ACTIVE]: pack tasks of each active expert
ROWS = GATE_UP + 96
ROW_TASKS = GATE_UP + 104
DOWN_CHUNKS = GATE_UP + 112  # runs of outputs
DOWN_SPLITS = GATE_UP + 120  # down tasks of each: each adds a share of the experts

SPIN_NS = 12 * _LINE
STARTED_AT = SPIN_NS + 8
STATE = SPIN_NS + 16  # who has the pool: one of the states below, or a thread that prepares a call
STARTER = SPIN_NS + 24  # the thread inside ``start``; 0 once its caller has the call's number
FAILED_CALL = SPIN_NS + 32  # number of the last call of which a task failed
EXPERTS = SPIN_NS + 40  # of the current call: address of int64 [ACTIVE], the experts' numbers in
# their layer; 0: it is not a layer's

LAST = 13 * _LINE  # of the call FAILED_CALL, written before the pool is freed:
LAST_STATUS = LAST
LAST_STAGE = LAST + 8
LAST_INDEX = LAST + 16
LAST_ACTIVE = LAST + 24  # the active expert that the task was for; -1: none, as of rows
LAST_STARTED = LAST + 32
LAST_FINISHED = LAST + 40
LAST_EXPERT = LAST + 48  # the number of that expert in its layer; -1: none

CONTROL_BYTES = 14 * _LINE
BARRIER_BYTES = _LINE

# The states of a pool, and who may take each step, by one compare-and-exchange of STATE:
#
#   FREE ----> id ----> LAUNCHING ----> RUNS - n <----> DRIVEN ----> FREE
#     1. FREE -> id: any thread, to its own id (``Control.claim``), and back (``release``). From the
#        id of a thread that has ended, also any thread, to its own.
#     2. id -> LAUNCHING: the thread of this id. FREE -> LAUNCHING: any thread, for a call that is
#        arranged already (``launch.launch``). Back to either: the same thread, if nothing began.
#     3. LAUNCHING -> RUNS - n: the same thread; or at once -> DRIVEN (``queue.run``).
#     4. RUNS - n -> DRIVEN: any thread that waits for call n. Back: the same one, if it waited for
#        the rows only.
#     5. DRIVEN -> FREE: the same one, when all tasks have ended.
#   FREE or id -> CLOSED: any thread (``WorkerPool.close``); final.
#   any -> FORKED: a forked child, in its own copy; final.
FREE, LAUNCHING, DRIVEN, CLOSED, FORKED = 0, -1, -2, -3, -4
"""DRIVEN: a thread works on the running call or waits for it; no other thread may meanwhile."""
RUNS = -8
"""RUNS - n: call number n runs. With its number, so that nobody ends a later call by mistake."""
NOT_RUNNING = -(1 << 62)
"""Returned in place of a status."""

STAGES = ("rows", "pack", "gate-up", "down")
"""Names of the numbers in FAILED_STAGE."""
