"""How a call of the experts begins on a pool: claimed, taken in and published by compiled code.

The workers wait for all that happens here, and it runs cold (``pykernels.cpu.moe.call``). So a call
whose inputs are laid out as the last one's were, which is the rule when tokens are generated, takes
a tuple to see that, and then one compiled function. Any other call is arranged first.

Several threads may call. Who looks at how the last call was arranged does not have the pool yet,
and until it has, another thread may arrange and run a call of its own. So the descriptor counts
(``JOB``'s ``arranged``): a look is worth something only if the count is still the same when the
pool is taken. What a look needs is one tuple (``_Spare``), taken in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident

import torch
from numba import types

from pykernels.cpu import MoECall, contiguous_rows
from pykernels.cpu.intrin.sync import atomic_exchange, atomic_store
from pykernels.cpu.jit import direct, kernel
from pykernels.cpu.job import job_at
from pykernels.cpu.moe.call import BAD_EXPERT, take_call
from pykernels.cpu.moe.kernel import MoEKernel
from pykernels.cpu.raised import RAISED, first
from pykernels.quant import PackedExperts

from ..workers.control import TaskError
from ..workers.queue import FREE, LAUNCHING, RUNS, STATE, open_call
from ..workers.worker import WorkerPool

_NOT_OURS = -2
"""Beside BAD_EXPERT, what ``launch`` returns where the workers got nothing."""


_Look = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[object, ...]]

_Like = tuple[int, tuple[object, ...], dict[str, torch.Tensor], Callable[..., torch.Tensor], _Look]
"""What the next call has to be like, to begin as it is: the descriptor's count, the layout of its
inputs, the workspace's buffers (outdated ones would do, but their memory is to go); what makes
room for its result; and what takes a layout."""

_Spare = tuple[torch.Tensor, int, _Like]
"""Room for the result of such a call, and its address. It serves one, since a launch counts too."""


@kernel()
def launch(control, owner, thread, job_address, arranged, x, ids, weights, y):  # type: ignore[no-untyped-def]
    """Starts an arranged call, if the pool is in the state ``owner``: free, or claimed by it.

    Args:
        thread: the caller's.
        arranged: the descriptor's count when the call was found to be arranged.
        x, ids, weights, y: addresses, as in ``take_call``.

    Returns:
        the call's number, from 1. Or BAD_EXPERT or RAISED, and the pool is free; or _NOT_OURS, and
        all is as it was.
    """
    if atomic_exchange(control + STATE, owner, LAUNCHING) != owner:
        return _NOT_OURS
    job = job_at(job_address)
    nowhere = (x == 0 or ids == 0 or weights == 0 or y == 0) and job.T * job.topk > 0  # a fake's
    if nowhere or job.arranged != arranged:  # or who had the pool has arranged another call
        atomic_store(control + STATE, owner)
        return _NOT_OURS
    active = take_call(job_address, x, ids, weights, y)
    if active < 0:
        atomic_store(control + STATE, FREE)
        return active
    job.arranged = arranged + 1
    number = open_call(
        control,
        thread,
        job.run_gate_up,
        job.run_down,
        job_address,
        active,
        job.i_chunks,
        job.h_chunks if active > 0 else 0,
        job.down_splits,
        job.run_pack,
        job.P,
        job.piece_active,
        job.pieces,
        job.run_rows,
        job.row_tasks,
        job.experts,
    )
    atomic_store(control + STATE, RUNS - number)
    return number


def _layout(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[object, ...]:
    """All that a call is arranged by, if the inputs are contiguous; and how y is to be made."""
    return (
        x.shape,
        x.dtype,
        x.is_contiguous(),
        x.is_cpu,
        ids.shape,
        ids.dtype,
        ids.is_contiguous(),
        ids.is_cpu,
        weights.shape,
        weights.dtype,
        weights.is_contiguous(),
        weights.is_cpu,
        torch.is_inference_mode_enabled(),
    )


def _layout_and_signs(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[object, ...]:
    """The same, and whether x or weights are negated views, which say the opposite of what lies in
    memory. One of several values is not contiguous: it is half of complex ones."""
    return *_layout(x, ids, weights), x.is_neg(), weights.is_neg()


class Part:
    """One slice of a layer, bound to the pool that works on it.

    Attributes:
        held: of each thread, what the workers use of its call: till its ticket has that, or another
            thread has the pool, so that the call has ended.
    """

    def __init__(
        self, packed: PackedExperts, kernel: MoEKernel, pool: WorkerPool, gemm_from: int
    ) -> None:
        self.pool = pool
        self._moe = MoECall(packed, kernel, pool.workspace, pool.threads, gemm_from=gemm_from)
        self._job = self._moe.address
        self._workspace = pool.workspace
        self._launch = direct(launch, *[types.int64] * 9)
        self._like: _Like | None = None  # for who has claimed the pool
        self._spare: _Spare | None = None
        self.held: dict[int, tuple[torch.Tensor, ...]] = {}

    def repeat(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[int, torch.Tensor, _Like] | None:
        """Begins a call like the last one, if it can be had at once.

        Returns:
            the call's number, y, and what ``make_spare`` takes. Or None: nothing has begun, and
            ``arrange`` or ``begin`` say why not.
        """
        spare = self._spare
        if spare is None:
            return None
        y, address, like = spare
        arranged, layout, buffers, make, look = like
        try:
            if buffers is not self._workspace.buffers or look(x, ids, weights) != layout:
                return None
            at_x, at_ids, at_weights = x.data_ptr(), ids.data_ptr(), weights.data_ptr()
        except (AttributeError, RuntimeError):  # no tensor, or one of which no such thing is known
            return None
        # The spare stays: should Ctrl-C come behind the launch, y outlives the tasks. Nobody begins
        # with it again, since the launch counts. And x is copied by then: there are no row tasks.
        call = self._launch(
            self.pool.control,
            FREE,
            get_ident(),
            self._job,
            arranged,
            at_x,
            at_ids,
            at_weights,
            address,
        )
        return (call, y, (arranged + 1, layout, buffers, make, look)) if call > 0 else None

    def check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Whether a call of such inputs could be arranged.

        Raises:
            PykernelsError: no.
        """
        self._moe.check(x, ids, weights)

    def arrange(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Makes all ready for ``begin``; for who has claimed the pool.

        Raises:
            PykernelsError: inputs that do not fit, or a pool that this thread has no more.
        """
        self.pool.prepare(lambda: self._arrange(x, ids, weights, y))

    def _arrange(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        self._like = self._spare = None
        self.held.clear()  # no call runs
        rows = contiguous_rows(x)
        taken = self._moe.arrange(rows, ids, weights, y)
        most = min(self._moe.experts.shape.E, ids.numel())
        self.pool.reserve_barriers(most, self._moe.down_chunks)
        self.held[get_ident()] = rows, *taken, y
        same = rows is x and x.is_contiguous() and taken[0] is ids and taken[1] is weights
        if same and self._moe.row_tasks == 0:
            after = self._moe.arranged + 1  # the launch counts too
            make = torch.empty_like if ids.numel() else torch.zeros_like  # no task writes that
            look = _layout_and_signs if 1 in (x.numel(), weights.numel()) else _layout
            self._like = after, look(x, ids, weights), self._workspace.buffers, make, look

    def begin(self) -> tuple[int, _Like | None]:
        """Begins the call that this thread has arranged, on the pool that it has claimed.

        Returns:
            the call's number, and what ``make_spare`` takes.

        Raises:
            PykernelsError: no such expert, or a pool that was closed.
        """
        me, like, count = get_ident(), self._like, self._moe.arranged
        if (held := self.held.get(me)) is None:  # a signal handler has made a call in between
            raise self.pool.refusal()
        at = [tensor.data_ptr() for tensor in held]
        before = time.monotonic_ns()
        call = self._launch(self.pool.control, me, me, self._job, count, *at)
        if call == BAD_EXPERT:
            raise self._moe.bad_routing(held[1])
        if call == RAISED:
            cause = first(before, time.monotonic_ns())
            raise TaskError(call, "rows", 0, None, raised=cause)
        if call < 0:
            raise self.pool.refusal()
        if not held[1].numel():  # no task will write y
            held[-1].zero_()
        return call, like

    def let_go(self) -> None:
        """What is held of this thread's call is another's now, or the call has ended."""
        self.held.pop(get_ident(), None)

    def make_spare(self, y: torch.Tensor, like: _Like) -> None:
        """Room for the result of the next call, while the workers run this one."""
        spare = like[3](y)
        self._spare = spare, spare.data_ptr(), like

    @property
    def row_tasks(self) -> int:
        """Of the call that was arranged last: while they run, they read the caller's x."""
        return self._moe.row_tasks

    @property
    def active(self) -> int:
        """Experts of the call that began last."""
        return self._moe.active

    @property
    def runs(self) -> bool:
        """Whether a call of this slice has not been waited for yet."""
        call = self.pool.number
        return self.pool.goes_on(call) and self.pool.job == self._job

    def settle(self) -> None:
        """Waits for a call of this slice, if one runs: what it reads may go then."""
        call = self.pool.number  # in this order: where another call came since, its job tells
        if self.pool.job == self._job:
            self.pool.settle(call)  # by number: ``__del__`` may come while this thread has a claim
