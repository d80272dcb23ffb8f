"""The control block of a pool, as Python sees it: who may use the pool, and how a call is awaited.

Threads may share a pool: each call is prepared, started and waited for under the block's ``STATE``,
which only compare-and-exchange changes. So if another thread or a signal handler has changed it
since it was read, the step fails and nothing is done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
from numba import types

from pykernels.cpu import raised
from pykernels.cpu.jit import direct
from pykernels.errors import PykernelsError

from . import control_block as block
from . import queue

_STATE, _NUMBER = block.STATE // 8, block.EPOCH // 8
_STARTER = block.STARTER // 8
_STARTED_AT, _FINISHED_AT = block.STARTED_AT // 8, block.FINISHED_AT // 8

NAP = 50e-6  # seconds between looks at what another thread does; no call of this thread waits so


class TaskError(RuntimeError):
    """A task raised, or returned a status other than 0; the pool stays usable.

    Attributes:
        status: what it returned.
        stage: "rows", "pack", "gate-up" or "down"; "" if it is not known: a later call failed too.
        index: the task's number in the stage.
        active: which of the call's active experts it worked on; None for rows.
        expert: that expert's number in the layer, if the call is a layer's.
        raised: what it raised, also the ``__cause__``; None if it returned the status.
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
        self.status, self.stage, self.index = status, stage, index
        self.active, self.expert = active, expert
        self.raised = self.__cause__ = raised
        of = f" of active expert {active}" if expert is None else f" of expert {expert}"
        where = "" if active is None else of
        how = f"failed with status {status}" if raised is None else f"raised {raised!r}"
        super().__init__(f"{stage} task {index}{where} {how}" if stage else f"a task {how}")
        self._made_of = status, stage, index, active, expert, raised

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._made_of


class Control:
    """A control block: a thread claims it, prepares a call and starts it; ending it frees the pool.

    Args:
        driver_works: whether the thread that waits works along.
        spin_us: how long an idle thread spins before it sleeps.

    Attributes:
        control: the block's address.
    """

    def __init__(self, driver_works: bool, spin_us: float) -> None:
        self.driver_works = driver_works
        raw = np.zeros(block.CONTROL_BYTES // 8 + 8, np.int64)
        self.control = align(raw.ctypes.data)
        self._words = raw[(self.control - raw.ctypes.data) // 8 :]
        self._word = self._words.data  # the same as a memoryview: numpy's scalars are slow
        self._words[block.SPIN_NS // 8] = int(spin_us * 1000)
        queue.compile_all()  # now: neither a worker nor a handler of Ctrl-C can compile
        self._finish = direct(
            queue.finish, types.int64, types.int64, types.boolean, *[types.int64] * 3
        )
        self._hand_out = direct(queue.hand_out, types.int64, types.int64)

    def claim(self) -> None:
        """Keeps the pool, and the ``workspace`` that all layers share, for a call that this thread
        prepares, until it starts or ``release`` gives it up.

        Raises:
            PykernelsError: a call is running, another thread prepares one, or this thread does (and
                a signal handler asks for a second), the pool is closed, or this is a forked child.
        """
        # A claim of this thread's own was left behind by Ctrl-C, unless ``prepare`` is running.
        mine = block.FREE, threading.get_ident()
        if (state := queue.change_state(self.control, *mine)) not in mine:
            self.abandon()
            if queue.change_state(self.control, *mine) not in mine and not self._inherit():
                raise self.refusal()
        elif state != block.FREE and self._in_preparation:
            raise self.refusal()

    def _inherit(self) -> bool:
        """Takes over the claim of a thread that has ended without ``release``."""
        state, me = self._word[_STATE], threading.get_ident()
        if state <= block.FREE or state in sys._current_frames():
            return False
        return bool(queue.change_state(self.control, state, me) == state)

    def release(self) -> None:
        """Gives up what this thread has claimed, if it has not started a call since."""
        if not self._in_preparation:
            queue.change_state(self.control, threading.get_ident(), block.FREE)

    @property
    def claimed(self) -> bool:
        """Whether this thread has claimed the pool."""
        return self._word[_STATE] == threading.get_ident()

    def prepare(self, steps: Callable[[], None]) -> None:
        """Runs ``steps``, which prepare the call that this thread has claimed the pool for.

        A signal handler that makes a call meanwhile is refused: the descriptor is half written.

        Raises:
            PykernelsError: this thread has lost the pool: such a handler came before.
        """
        if not self.claimed:
            raise self.refusal()
        steps()

    @property
    def _in_preparation(self) -> bool:
        """Whether ``prepare`` is on this thread's stack; Ctrl-C might leave a flag set."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is Control.prepare.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def hand_out(self) -> None:
        """Says that the caller has the number of the call that this thread has started, and will
        wait for it: ``abandon`` leaves it alone from now on."""
        self._hand_out(self.control, threading.get_ident())

    def abandon(self) -> None:
        """Waits for a call that this thread has started and not handed out, if there is one.

        Ctrl-C came in between, so nobody has its number to wait for it, and the caller is about to
        free the buffers that it writes.
        """
        call = self._word[_NUMBER]
        # In this order: STARTER is written before the call runs.
        if self.goes_on(call) and self._word[_STARTER] == threading.get_ident():
            self._end(call)

    def wait_for_rows(self, call: int | None = None) -> None:
        """Waits until a call has copied its inputs; works along as in ``wait``.

        If a task fails, ``wait`` raises it.

        Args:
            call: its number; None for the one that runs. One that has ended has copied them.

        Raises:
            PykernelsError: no number is given and no call is in flight, or this is a forked child.
        """
        call = self.running if call is None else call
        if call is None:
            raise self._nothing_runs()
        while not queue.finish_rows(self.control, call, self.driver_works) and self.goes_on(call):
            time.sleep(NAP)

    def end(
        self, call: int | None = None, counters: int = 0, tokens: int = 0, nbytes: int = 0
    ) -> bool:
        """Waits for a call and counts it, as ``queue.finish`` does.

        Args:
            call: its number; None for the one that runs.

        Returns:
            whether it was counted; not if another thread has waited for it, or ``close``.

        Raises:
            PykernelsError: no call is in flight, or this is a forked child.
            TaskError: a task failed; the first one that did.
        """
        call = self.running if call is None else call
        if call is None:
            raise self._nothing_runs()
        # Compiled code: Python raises KeyboardInterrupt when it returns, and the pool is free then.
        status = self._finish(self.control, call, self.driver_works, counters, tokens, nbytes)
        if status == block.NOT_RUNNING:
            status = self._end(call, counters, tokens, nbytes)
        if status == block.NOT_RUNNING:
            self._check_ended(call)
            return False
        self._check(call, status)
        return True

    def wait(self, call: int | None = None) -> float:
        """``end``; returns the seconds from the call's start to its last task."""
        self.end(call)
        return self.seconds

    @property
    def seconds(self) -> float:
        """From the start of the last call to its last task."""
        return (self._word[_FINISHED_AT] - self._word[_STARTED_AT]) / 1e9

    @property
    def running(self) -> int | None:
        """The number of the call that was started and that no thread waits for yet."""
        state = self._word[_STATE]
        return block.RUNS - state if state < block.RUNS else None

    @property
    def job(self) -> int:
        """The address of the last call's descriptor."""
        return self._word[block.JOB // 8]

    def settle(self, call: int | None = None) -> None:
        """Waits for a call, if it has not ended. Its ticket can still be given to ``sync``.

        Args:
            call: its number; None for the last one; then a claim of this thread that Ctrl-C has
                left behind is released, too.
        """
        if call is None:
            self.release()
            call = self.number
        self._end(call)

    @property
    def number(self) -> int:
        """The number of the last call."""
        return self._word[_NUMBER]

    def _end(self, call: int, counters: int = 0, tokens: int = 0, nbytes: int = 0) -> int:
        """Waits for a call, also while another thread does; NOT_RUNNING if another thread did."""
        work = self.control, call, self.driver_works, counters, tokens, nbytes
        while (status := self._finish(*work)) == block.NOT_RUNNING and self.goes_on(call):
            time.sleep(NAP)
        return status

    def goes_on(self, call: int) -> bool:
        """Whether a call has not ended yet; another thread may be waiting for it."""
        state = self._word[_STATE]
        return state in (block.DRIVEN, block.RUNS - call) and self._word[_NUMBER] == call

    def _check_ended(self, call: int) -> None:
        """Raises the failure of a call that another thread has waited for, if it failed.

        Raises:
            PykernelsError: this is a forked child; or whether it failed is not known any more.
            TaskError: a task failed.
        """
        word = self._word
        if word[_STATE] == block.FORKED:
            raise self.refusal()  # it may have run on in the parent
        if (failed := word[block.FAILED_CALL // 8]) < call:
            return
        status = word[block.LAST_STATUS // 8]
        if failed == word[block.FAILED_CALL // 8] == call:
            self._check(call, status)
        raise PykernelsError(
            "a task of this call failed, or of a later one on its pool",
            "sync a ticket before another call runs",
        )

    def refusal(self) -> PykernelsError:
        """Why a call cannot be prepared or started now."""
        state = self._word[_STATE]
        match state:
            case block.FORKED:
                return PykernelsError(
                    "this worker pool belongs to the parent process; threads do not survive a fork",
                    "Make the pool in the process that uses it, or start that with 'spawn'",
                )
            case block.CLOSED:
                return PykernelsError("the worker pool is closed", "Make a new WorkerPool")
        if state == block.DRIVEN or state < block.RUNS:
            return PykernelsError(
                "a call is still running on this pool",
                "sync it before the next submit; call settle() of the pool if its ticket is lost",
            )
        who = "another thread" if state != threading.get_ident() else "this thread, interrupted,"
        return PykernelsError(
            f"{who} prepares a call on this pool", "Make one call after the other"
        )

    def _nothing_runs(self) -> PykernelsError:
        if self._word[_STATE] in (block.FORKED, block.CLOSED):
            return self.refusal()  # a child has no workers that would end the call
        return PykernelsError("no call is running on this pool", "submit one before sync")

    def _check(self, call: int, status: int) -> None:
        """Raises the failure of the call that ended with this status, if it is one."""
        if status:
            raise self._failure(call, status)

    def _failure(self, call: int, status: int) -> BaseException:
        word = self._word
        failed = word[block.FAILED_CALL // 8]
        last = word[block.LAST // 8 : block.LAST_EXPERT // 8 + 1].tolist()
        if (failed, word[block.FAILED_CALL // 8]) != (call, call):  # another failed since
            return TaskError(status, "", 0, None)
        _, stage, index, active, started, finished, expert = last
        cause = None
        if status == raised.RAISED:
            cause = raised.first(started, finished, self._elsewhere())
        if cause is not None and not isinstance(cause, Exception):
            return cause  # Ctrl-C, while the exception was made
        known = [number if number >= 0 else None for number in (active, expert)]
        return TaskError(status, block.STAGES[stage], index, known[0], known[1], cause)

    def _elsewhere(self) -> set[int | None]:
        """Threads of other pools: what they raise is not this call's failure."""
        return set()


def until_done(step: Callable[[], object]) -> None:
    """Repeats a step that Ctrl-C cuts short until it is done; raises what came after that.

    For ``__del__``: what the workers use is freed when it returns.
    """
    interruption = None
    while True:
        try:
            step()
            break
        except (AttributeError, RuntimeError, TypeError):
            raise  # no interruption: at the end of the interpreter, it would fail for ever
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption


def align(address: int) -> int:
    """The next address where a cache line begins."""
    return -(-address // 64) * 64
