"""How a call of the experts begins on a pool: claimed, taken in and published by compiled code.

The workers wait for all that happens here, and it runs cold (``pykernels.cpu.arrival``). So a call
whose inputs are laid out as the last one's were, which is the rule when tokens are generated, takes
a tuple to see that, and then one compiled function. Any other call is arranged first.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from numba import types

from pykernels.cpu import MoECall, contiguous_rows
from pykernels.cpu.arrival import BAD_EXPERT, take_call
from pykernels.cpu.intrin.sync import atomic_exchange, atomic_store
from pykernels.cpu.jit import direct, kernel
from pykernels.cpu.job import job_at
from pykernels.cpu.moe import MoEKernel
from pykernels.quant import PackedExperts

from .tasks import FREE, LAUNCHING, STATE, open_call
from .workers import WorkerPool

_NOT_OURS = -2
"""Beside BAD_EXPERT, what ``launch`` returns where the workers got nothing."""


@kernel()
def launch(control, owner, job_address, x, ids, weights, y):  # type: ignore[no-untyped-def]
    """Starts an arranged call, if the pool is in the state ``owner``: free, or claimed by it.

    Args:
        x, ids, weights, y: addresses, as in ``take_call``.

    Returns:
        the number of active experts. Or BAD_EXPERT, and the pool is free; or _NOT_OURS.
    """
    if atomic_exchange(control + STATE, owner, LAUNCHING) != owner:
        return _NOT_OURS
    active = take_call(job_address, x, ids, weights, y)
    if active == BAD_EXPERT:
        atomic_store(control + STATE, FREE)
        return active
    job = job_at(job_address)
    open_call(
        control,
        job.run_gate_up,
        job.run_down,
        job_address,
        active,
        job.i_chunks,
        job.h_chunks if active > 0 else 0,
        job.h_legs,
        job.run_pack,
        job.P,
        job.piece_active,
        job.pieces,
        job.run_rows,
        job.row_tasks,
    )
    return active


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


class Part:
    """One slice of a layer, bound to the pool that works on it.

    Attributes:
        row_tasks: of the call that began last: while they run, they read the caller's x.
        held: what the workers use of the call that began last, until its ticket has it.
    """

    def __init__(
        self, packed: PackedExperts, kernel: MoEKernel, pool: WorkerPool, gemm_from: int
    ) -> None:
        self.pool = pool
        self._moe = MoECall(packed, kernel, pool.workspace, pool.threads, gemm_from=gemm_from)
        self._job = self._moe.address
        self._workspace = pool.workspace
        self._buffers = self._workspace.buffers  # where a call was arranged; it may be replaced
        self._launch = direct(launch, *[types.int64] * 7)
        self._seen: tuple[object, ...] | None = None  # the layout that ``repeat`` takes
        self._spare: list[tuple[torch.Tensor, int]] = []  # y for such a call, and its address
        self.row_tasks = 0
        self.held: tuple[torch.Tensor, ...] | None = None

    def repeat(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[int, torch.Tensor] | None:
        """Begins a call like the last one, if it can be had at once.

        Returns:
            the number of active experts, and y. Or None: nothing has begun, ``begin`` says why not.
        """
        if (
            not self._spare
            or self._workspace.buffers is not self._buffers
            or _layout(x, ids, weights) != self._seen
        ):
            return None
        y, address = spare = self._spare.pop()  # no other thread gets the same
        self.held = x, y  # should Ctrl-C come now, the buffers outlive what uses them
        active = self._launch(
            self.pool.control,
            FREE,
            self._job,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            address,
        )
        if active == 0:  # no task will write it
            y.zero_()
        if active >= 0:
            return active, y
        self._spare.append(spare)
        return None

    def arrange(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Makes all ready for ``begin``; for who has claimed the pool.

        Raises:
            PykernelsError: inputs that do not fit.
        """
        self._seen = None
        self._spare.clear()
        rows = contiguous_rows(x)
        taken = self._moe.arrange(rows, ids, weights, y)
        most = min(self._moe.experts.shape.E, ids.numel())
        self.pool.reserve_barriers(most, self._moe.down_chunks)
        self._buffers = self._workspace.buffers
        self.row_tasks = self._moe.row_tasks
        self.held = rows, *taken, y
        if x.is_contiguous() and taken[0] is ids and taken[1] is weights:
            self._seen = _layout(x, ids, weights)

    def begin(self) -> int:
        """Begins the call that was arranged; returns the number of its active experts.

        Raises:
            PykernelsError: no such expert, or a pool that is not this thread's.
        """
        assert self.held is not None
        at = [tensor.data_ptr() for tensor in self.held]
        active = self._launch(self.pool.control, threading.get_ident(), self._job, *at)
        if active == BAD_EXPERT:
            raise self._moe.bad_routing(self.held[1])
        if active < 0:
            raise self.pool.refusal()
        if active == 0:
            self.held[-1].zero_()
        return active

    def make_spare(self, y: torch.Tensor) -> None:
        """Room for the result of the next call, while the workers run this one."""
        if self._seen is not None and self.row_tasks == 0:
            spare = torch.empty_like(y)
            self._spare.append((spare, spare.data_ptr()))

    def expert(self, active: int) -> int:
        """The number of an active expert of the last call."""
        at = int(self._moe.job["experts"][0]) + 8 * active
        return ctypes.c_int64.from_address(at).value
