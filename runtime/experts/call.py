"""Calls of a layer's experts from outside a program: what the jobs of all slices read."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from pykernels.cpu import MoECall, contiguous_rows
from pykernels.cpu.moe.args import MOE_ARGS
from pykernels.cpu.moe.kernel import MoEKernel
from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts

from ..workers.job import Job, Jobs
from ..workers.moe_job import MOE, barrier_bytes, describe, make_moe
from ..workers.pool import InFlight, WorkerPool
from ..workers.reduce import Reduction

_AT = {name: index for index, name in enumerate(MOE.names or ())}


class ExpertsCall:
    """The descriptors of a layer's calls on a pool, one a slice.

    Args:
        slices: each for a NUMA node of the pool; one: for all workers.

    Raises:
        PykernelsError: more slices than the pool has nodes.
    """

    def __init__(
        self, slices: Sequence[PackedExperts], kernel: MoEKernel, pool: WorkerPool, gemm_from: int
    ) -> None:
        if len(slices) > len(pool.nodes):
            raise PykernelsError(
                f"experts that were split across {len(slices)} NUMA nodes cannot run on a pool of"
                f" {len(pool.nodes)}",
                "Configure threads and nodes before loading the model",
            )
        self.pool = pool
        self.slices = [
            _Slice(packed, kernel, pool, gemm_from, i if len(slices) > 1 else None)
            for i, packed in enumerate(slices)
        ]
        self._few, self._reduction = self._jobs(with_rows=False)
        self._many, self._reduction_behind_rows = self._jobs(with_rows=True)

    def _jobs(self, with_rows: bool) -> tuple[Jobs, Reduction | None]:
        jobs = list[Job]()
        ends = list[int]()
        for part in self.slices:
            jobs += [part.rows, part.behind_rows] if with_rows else [part.alone]
            ends.append(len(jobs) - 1)
        if len(ends) == 1:
            return Jobs(jobs), None
        reduction = Reduction(after=[len(jobs) - end for end in ends])
        return Jobs([*jobs, reduction.job]), reduction

    def check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Raises PykernelsError for inputs that do not fit (``MoECall.check``)."""
        self.slices[0].call.check(x, ids, weights)

    def bad_routing(self, ids: torch.Tensor) -> PykernelsError:
        """The error of a routing that names an expert that there is not."""
        return self.slices[0].call.bad_routing(ids)

    def start(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> InFlight:
        """Begins a call whose inputs have passed ``check``; ``InFlight.result`` will be the number
        of active experts.

        Args:
            y: bf16 or float32 [T, H], contiguous.

        Raises:
            PykernelsError: the pool is closed, or the parent process's.
        """
        pool, rows, several = self.pool, contiguous_rows(x), len(self.slices) > 1
        make = torch.empty_like if ids.numel() else torch.zeros_like  # no task will write it
        outs = [make(y, dtype=torch.float32) for _ in self.slices] if several else [y]
        with pool.lock:
            pool.drain()  # before the descriptors and the workspaces are written
            kept = [
                part.arrange(rows, ids, weights, out)
                for part, out in zip(self.slices, outs, strict=True)
            ]
            call = self.slices[0].call
            jobs, reduction = self._few, self._reduction
            if call.row_tasks:
                jobs, reduction = self._many, self._reduction_behind_rows
            if reduction is not None:
                reduction.arrange(outs, y)
            return pool.publish(jobs, (self, rows, y, kept), lambda: call.active)


class _Slice:
    """One slice: its descriptor and its jobs.

    Attributes:
        call: the kernels' descriptor.
        rows, behind_rows, alone: copying the inputs and the experts behind it; the experts of a
            call whose inputs are copied in their setup.
    """

    def __init__(
        self,
        packed: PackedExperts,
        kernel: MoEKernel,
        pool: WorkerPool,
        gemm_from: int,
        node: int | None,
    ) -> None:
        workers = pool.threads if node is None else pool.nodes[node].count
        workspace = pool.workspaces[node or 0]
        scratches = pool.threads  # tasks know their workers by numbers in the whole pool
        self.call = MoECall(
            packed, kernel, workspace, workers, gemm_from=gemm_from, scratches=scratches
        )
        self._moe = np.zeros(1, MOE)
        self._words = self._moe.view(np.int64).data  # as a memoryview: numpy's scalars are slow
        self._words[_AT["ring"]], self._words[_AT["args"]] = pool.ring, self.call.address
        self._words[_AT["count_at"]] = self.call.address + _offset("T")
        self._barriers = np.zeros(0, np.int64)
        setup, run = make_moe()
        # The job's description must not keep the weights alive: a pool remembers its last jobs.
        describe_task = functools.partial(describe, self.call.args)
        record = int(self._moe.ctypes.data)
        self.alone, self.behind_rows = (
            Job("experts", run.address, record, setup.address, 1, after, describe_task, node)
            for after in (0, 1)
        )
        rows = kernel.stages.rows.address
        self.rows = Job("rows", rows, self.call.address, after=0, node=node)

    def arrange(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> object:
        """Writes a call; returns what must live until it has ended."""
        call, words = self.call, self._words
        ids, weights = call.arrange(rows, ids, weights, y)
        words[_AT["ids"]], words[_AT["weights"]] = ids.data_ptr(), weights.data_ptr()
        needed = barrier_bytes(call.experts.shape.E, call.down_chunks) // 8
        if needed > len(self._barriers):
            self._barriers = np.zeros(needed + 8, np.int64)
            words[_AT["barriers"]] = self._barriers.ctypes.data + -self._barriers.ctypes.data % 64
        self.rows.tasks = call.row_tasks
        return ids, weights, y


def _offset(field: str) -> int:
    """Bytes from a ``MOE_ARGS``'s beginning."""
    return int(MOE_ARGS.fields[field][1])  # type: ignore[index]
