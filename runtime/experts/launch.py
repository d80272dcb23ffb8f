"""How a call of the experts begins on a pool: the inputs are taken and published by compiled code.

The workers wait for all that happens here, and it runs with cold caches. So a call whose inputs are
laid out as the last call's, which is the rule when tokens are generated, compares one tuple and
then calls one compiled function (``Part.repeat``). Any other call is arranged first: its shapes and
buffers are written to the descriptor.

Several threads may call. A thread compares layouts before it has the pool, and until it has it,
another thread may arrange and run a call. So the descriptor has a count (``JOB``'s ``arranged``):
``launch`` refuses if it has changed. What the comparison needs is one tuple (``_Spare``), read in
one step.
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
from ..workers.control_block import FREE, LAUNCHING, RUNS, STATE
from ..workers.queue import open_call
from ..workers.worker_pool import WorkerPool

_NOT_OURS = -2
"""Returned by ``launch`` if it did nothing; beside BAD_EXPERT and RAISED."""


_Look = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[object, ...]]

_Like = tuple[int, tuple[object, ...], dict[str, torch.Tensor], Callable[..., torch.Tensor], _Look]
"""What a call must equal to be launched as it is: the descriptor's count, the layout of its inputs,
the workspace's buffers (old ones would work, but their memory is to be freed). And the function
that makes room for its result, and the one that takes a layout."""

_Spare = tuple[torch.Tensor, int, _Like]
"""Room for the result of such a call, and its address. For one call: a launch changes the count."""


@kernel()
def launch(control, owner, thread, job_address, arranged, x, ids, weights, y):  # type: ignore[no-untyped-def]
    """Starts an arranged call, if the pool is in the state ``owner``: free, or claimed by it.

    Args:
        thread: the caller's id.
        arranged: the descriptor's count when the caller compared layouts.
        x, ids, weights, y: addresses, as in ``take_call``.

    Returns:
        the call's number, from 1. Or BAD_EXPERT or RAISED, and the pool is free; or _NOT_OURS, and
        nothing has changed.
    """
    if atomic_exchange(control + STATE, owner, LAUNCHING) != owner:
        return _NOT_OURS
    job = job_at(job_address)
    # A fake tensor has no memory; and another thread may have arranged another call.
    no_memory = (x == 0 or ids == 0 or weights == 0 or y == 0) and job.T * job.topk > 0
    if no_memory or job.arranged != arranged:
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
    """All that the descriptor depends on, if the inputs are contiguous; and how y is made."""
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
    """The same, and whether x or weights are negated views (of the imaginary part of a conjugated
    tensor), whose memory has the other sign. Only with one value are they contiguous."""
    return *_layout(x, ids, weights), x.is_neg(), weights.is_neg()


class Part:
    """One slice of a layer, bound to the pool that works on it.

    Attributes:
        held: by thread, the tensors that the workers use of its call, kept alive until its ticket
            keeps them, or the next call is arranged.
    """

    def __init__(
        self, packed: PackedExperts, kernel: MoEKernel, pool: WorkerPool, gemm_from: int
    ) -> None:
        self.pool = pool
        self._moe = MoECall(packed, kernel, pool.workspace, pool.threads, gemm_from=gemm_from)
        self._job = self._moe.address
        self._workspace = pool.workspace
        self._launch = direct(launch, *[types.int64] * 9)
        self._like: _Like | None = None  # only used by the thread that has claimed the pool
        self._spare: _Spare | None = None
        self.held: dict[int, tuple[torch.Tensor, ...]] = {}

    def repeat(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[int, torch.Tensor, _Like] | None:
        """Launches a call whose inputs are laid out as the last call's, if the pool is free.

        Returns:
            the call's number, y, and what ``make_spare`` takes. Or None: nothing has begun, and
            ``arrange`` and ``begin`` must (or say why not).
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
        except (AttributeError, RuntimeError):  # no tensor, or one without strides or memory
            return None
        # ``_spare`` keeps y alive should Ctrl-C come right after the launch, and is not used again
        # since the count has changed. x is copied by then: such a call has no row tasks.
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
        """Checks inputs.

        Raises:
            PykernelsError: they do not fit these experts.
        """
        self._moe.check(x, ids, weights)

    def arrange(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Writes a call to the descriptor, for ``begin``; this thread has claimed the pool.

        Raises:
            PykernelsError: inputs that do not fit, or this thread has lost the pool.
        """
        self.pool.prepare(lambda: self._arrange(x, ids, weights, y))

    def _arrange(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        self._like = self._spare = None
        self.held.clear()  # the pool is claimed, so no call runs
        rows = contiguous_rows(x)
        taken = self._moe.arrange(rows, ids, weights, y)
        most = min(self._moe.experts.shape.E, ids.numel())
        self.pool.reserve_barriers(most, self._moe.down_chunks)
        self.held[get_ident()] = rows, *taken, y
        same = rows is x and x.is_contiguous() and taken[0] is ids and taken[1] is weights
        if same and self._moe.row_tasks == 0:
            after = self._moe.arranged + 1  # the launch adds 1
            make = torch.empty_like if ids.numel() else torch.zeros_like  # no task writes y
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
        if (held := self.held.get(me)) is None:  # a signal handler made a call meanwhile
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
        """Drops what is held of this thread's call: its ticket has it, or the call has ended."""
        self.held.pop(get_ident(), None)

    def make_spare(self, y: torch.Tensor, like: _Like) -> None:
        """Makes room for the result of the next call, while the workers run this one."""
        spare = like[3](y)
        self._spare = spare, spare.data_ptr(), like

    @property
    def row_tasks(self) -> int:
        """Of the call that was arranged last. They read the caller's x."""
        return self._moe.row_tasks

    @property
    def active(self) -> int:
        """Experts of the call that began last."""
        return self._moe.active

    @property
    def runs(self) -> bool:
        """Whether a call of this slice has not ended yet."""
        call = self.pool.number
        return self.pool.goes_on(call) and self.pool.job == self._job

    def settle(self) -> None:
        """Waits for a call of this slice, if one runs, so that its weights may be freed."""
        call = self.pool.number  # read before the job: a call that begins in between has another
        if self.pool.job == self._job:
            self.pool.settle(call)  # by number, which keeps a claim of this thread (``__del__``)
