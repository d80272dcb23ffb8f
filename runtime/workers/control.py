"""The control block of a pool, as Python sees it: whose turn it is, and how a call is waited for.

Threads may share a pool: each call is prepared, started and waited for under the block's ``STATE``
(``tasks``), which one atomic exchange changes. Whatever comes between two looks at it, another
thread or Ctrl-C, the exchange says so.
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

from . import queue

_STATE, _NUMBER = queue.STATE // 8, queue.EPOCH // 8
_INSIDE = queue.INSIDE // 8
_STARTED_AT, _FINISHED_AT = queue.STARTED_AT // 8, queue.FINISHED_AT // 8

NAP = 50e-6  # seconds between looks at what another thread does: rare, and never in a call's way


class TaskError(RuntimeError):
    """A task raised, or returned a status other than 0; the pool stays usable.

    Attributes:
        status: what it returned.
        stage: "rows", "pack", "gate-up" or "down"; "" if another call failed before this was told.
        index: its number in the stage.
        active: which of the call's active experts it worked on; None for rows, which are all's.
        expert: its number in the layer, where the call is one of a layer's experts.
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
    """A control block: who claims it prepares a call, and who ends a call frees it.

    Args:
        driver_works: whether the thread that waits works along.
        spin_us: how long an idle thread spins before it sleeps.

    Attributes:
        control: the block's address.
    """

    def __init__(self, driver_works: bool, spin_us: float) -> None:
        self.driver_works = driver_works
        raw = np.zeros(queue.CONTROL_BYTES // 8 + 8, np.int64)
        self.control = align(raw.ctypes.data)
        self._words = raw[(self.control - raw.ctypes.data) // 8 :]
        self._word = self._words.data  # the same as a memoryview: numpy's scalars are slow
        self._words[queue.SPIN_NS // 8] = int(spin_us * 1000)
        queue.compile_all()  # under the GIL, before any thread asks; and Ctrl-C finds them compiled
        self._finish = direct(
            queue.finish, types.int64, types.int64, types.boolean, *[types.int64] * 3
        )
        self._hand_out = direct(queue.hand_out, types.int64, types.int64)

    def claim(self) -> None:
        """Keeps the pool for a call that this thread prepares, in the ``workspace`` that all share,
        until it starts or ``release`` gives it up.

        Raises:
            PykernelsError: a call is running, another thread prepares one, this one does in the
                middle of which a signal came, the pool is closed, or this is a forked child.
        """
        # A claim of this thread's own was left behind by Ctrl-C: it prepares nothing now.
        mine = queue.FREE, threading.get_ident()
        if (state := queue.turn(self.control, *mine)) not in mine:
            self.abandon()
            if queue.turn(self.control, *mine) not in mine and not self._inherit():
                raise self.refusal()
        elif state != queue.FREE and self._in_preparation:
            raise self.refusal()

    def _inherit(self) -> bool:
        """Takes over the claim of a thread that has ended: Ctrl-C kept it from giving it up."""
        state, me = self._word[_STATE], threading.get_ident()
        if state <= queue.FREE or state in sys._current_frames():
            return False
        return bool(queue.turn(self.control, state, me) == state)

    def release(self) -> None:
        """Gives up what this thread has claimed, if it has not started a call since."""
        if not self._in_preparation:
            queue.turn(self.control, threading.get_ident(), queue.FREE)

    @property
    def claimed(self) -> bool:
        """Whether this thread has the pool for a call that it prepares."""
        return self._word[_STATE] == threading.get_ident()

    def prepare(self, steps: Callable[[], None]) -> None:
        """Takes the steps of preparing a call that this thread has claimed the pool for.

        A signal's handler that calls in the middle of them is refused: it would run, or leave
        behind, a descriptor that is half of each call.

        Raises:
            PykernelsError: this thread has the pool no more: such a handler came before.
        """
        if not self.claimed:
            raise self.refusal()
        steps()

    @property
    def _in_preparation(self) -> bool:
        """Whether ``prepare`` is on this thread's stack: a mark of its own Ctrl-C might leave."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is Control.prepare.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def hand_out(self) -> None:
        """The call that this thread has started is in the hands of who will wait for it: it is not
        one that Ctrl-C has left behind. If it has ended since, the next one is another's."""
        self._hand_out(self.control, threading.get_ident())

    def abandon(self) -> None:
        """Waits for a call that this thread has started and not handed out: Ctrl-C came in between,
        so nobody else will. Also where somebody does: its buffers may go behind this."""
        call = self._word[_NUMBER]
        # In this order: whoever starts a call names itself before it runs.
        if self.goes_on(call) and self._word[_INSIDE] == threading.get_ident():
            self._end(call)

    def wait_for_rows(self, call: int | None = None) -> None:
        """Waits until a call has copied its inputs; works along as in ``wait``.

        A task that fails is told by ``wait``.

        Args:
            call: its number; None for the one that runs. Where that has ended, its rows are there.

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
        """Waits for a call, which is counted as in ``tasks.finish``.

        Args:
            call: its number; None for the one that runs.

        Returns:
            whether it was counted; not if another thread has waited for it, or ``close``.

        Raises:
            PykernelsError: no call is in flight, or this is a forked child.
            TaskError: a task failed; which is the first one that did.
        """
        call = self.running if call is None else call
        if call is None:
            raise self._nothing_runs()
        # Ctrl-C counts when it returns: the pool is free then.
        status = self._finish(self.control, call, self.driver_works, counters, tokens, nbytes)
        if status == queue.NOT_RUNNING:
            status = self._end(call, counters, tokens, nbytes)
        if status == queue.NOT_RUNNING:
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
        """The number of the call that was started and that nobody waits for yet."""
        state = self._word[_STATE]
        return queue.RUNS - state if state < queue.RUNS else None

    @property
    def job(self) -> int:
        """The address of the last call's."""
        return self._word[queue.JOB // 8]

    def settle(self, call: int | None = None) -> None:
        """Waits for a call, if it has not ended. Who has its ticket can still ``sync``.

        Args:
            call: its number; None for the last one, and for what Ctrl-C has left of one that this
                thread prepared: it has the pool no longer.
        """
        if call is None:
            self.release()
            call = self.number
        self._end(call)

    @property
    def number(self) -> int:
        """Of the last call."""
        return self._word[_NUMBER]

    def _end(self, call: int, counters: int = 0, tokens: int = 0, nbytes: int = 0) -> int:
        """Waits for a call, also while another thread does; its status if none other has."""
        work = self.control, call, self.driver_works, counters, tokens, nbytes
        while (status := self._finish(*work)) == queue.NOT_RUNNING and self.goes_on(call):
            time.sleep(NAP)
        return status

    def goes_on(self, call: int) -> bool:
        """Whether a call that was started has not been waited for yet; somebody may be about it."""
        state = self._word[_STATE]
        return state in (queue.DRIVEN, queue.RUNS - call) and self._word[_NUMBER] == call

    def _check_ended(self, call: int) -> None:
        """Of a call that another has waited for: whether its result is one.

        Raises:
            PykernelsError: this is a forked child; or that is not known any more.
            TaskError: a task failed.
        """
        word = self._word
        if word[_STATE] == queue.FORKED:
            raise self.refusal()  # it may have run on in the parent
        if (failed := word[queue.FAILED_CALL // 8]) < call:
            return
        status = word[queue.LAST_STATUS // 8]
        if failed == word[queue.FAILED_CALL // 8] == call:
            self._check(call, status)
        raise PykernelsError(
            "a task of this call failed, or of a later one on its pool",
            "sync a ticket before another call runs",
        )

    def refusal(self) -> PykernelsError:
        """Why a call cannot be prepared or started now."""
        state = self._word[_STATE]
        match state:
            case queue.FORKED:
                return PykernelsError(
                    "this worker pool belongs to the parent process; threads do not survive a fork",
                    "Make the pool in the process that uses it, or start that with 'spawn'",
                )
            case queue.CLOSED:
                return PykernelsError("the worker pool is closed", "Make a new WorkerPool")
        if state == queue.DRIVEN or state < queue.RUNS:
            return PykernelsError(
                "a call is still running on this pool",
                "sync it before the next submit; call settle() of the pool if its ticket is lost",
            )
        who = "another thread" if state != threading.get_ident() else "this thread, interrupted,"
        return PykernelsError(
            f"{who} prepares a call on this pool", "Make one call after the other"
        )

    def _nothing_runs(self) -> PykernelsError:
        if self._word[_STATE] in (queue.FORKED, queue.CLOSED):
            return self.refusal()  # a child has no workers that would end the call
        return PykernelsError("no call is running on this pool", "submit one before sync")

    def _check(self, call: int, status: int) -> None:
        """Raises the failure of the call that ended with this status, if it is one."""
        if status:
            raise self._failure(call, status)

    def _failure(self, call: int, status: int) -> BaseException:
        word = self._word
        failed = word[queue.FAILED_CALL // 8]
        last = word[queue.LAST // 8 : queue.LAST_EXPERT // 8 + 1].tolist()
        if (failed, word[queue.FAILED_CALL // 8]) != (call, call):  # another failed since
            return TaskError(status, "", 0, None)
        _, stage, index, active, started, finished, expert = last
        cause = None
        if status == raised.RAISED:
            cause = raised.first(started, finished, self._elsewhere())
        if cause is not None and not isinstance(cause, Exception):
            return cause  # Ctrl-C, while the exception was made
        known = [number if number >= 0 else None for number in (active, expert)]
        return TaskError(status, queue.STAGES[stage], index, known[0], known[1], cause)

    def _elsewhere(self) -> set[int | None]:
        """Threads of other pools."""
        return set()


def until_done(step: Callable[[], object]) -> None:
    """Takes a step that Ctrl-C may cut short, as often as it does; only then raises what came.

    For who may not leave before: in ``__del__``, what workers use is freed behind it.
    """
    came = None
    while True:
        try:
            step()
            break
        except (AttributeError, RuntimeError, TypeError):
            raise  # Python's own, not Ctrl-C: a thread cannot be joined here, a module is empty
        except BaseException as error:
            came = error
    if came is not None:
        raise came


def align(address: int) -> int:
    """The next address where a cache line begins."""
    return -(-address // 64) * 64
