"""One slice of a layer's experts, bound to the pool that works on it: a call of it as jobs."""

from __future__ import annotations

import functools

import numpy as np
import torch

from pykernels.cpu import MoECall, contiguous_rows
from pykernels.cpu.moe.args import MOE_ARGS
from pykernels.cpu.moe.kernel import MoEKernel
from pykernels.quant import PackedExperts

from ..workers.job import Job, Jobs
from ..workers.moe_job import MOE, barrier_bytes, describe, make_moe
from ..workers.pool import InFlight, WorkerPool

_AT = {name: index for index, name in enumerate(MOE.names or ())}


class ExpertSlice:
    """The descriptor of a slice's calls.

    Attributes:
        call: the kernels' descriptor; ``pool``: the workers.
    """

    def __init__(
        self, packed: PackedExperts, kernel: MoEKernel, pool: WorkerPool, gemm_from: int
    ) -> None:
        self.pool = pool
        self.call = MoECall(packed, kernel, pool.workspace, pool.threads, gemm_from=gemm_from)
        self._moe = np.zeros(1, MOE)
        self._words = self._moe.view(np.int64).data  # as a memoryview: numpy's scalars are slow
        self._words[_AT["ring"]], self._words[_AT["args"]] = pool.ring, self.call.address
        self._words[_AT["count_at"]] = self.call.address + _offset("T")
        self._barriers = np.zeros(0, np.int64)
        setup, run = make_moe()
        # The job's description must not keep the weights alive: a pool remembers its last jobs.
        describe_task = functools.partial(describe, self.call.args)
        record = int(self._moe.ctypes.data)
        alone, behind_rows = (
            Job("experts", run.address, record, setup.address, after=after, describe=describe_task)
            for after in (0, 1)
        )
        rows = kernel.stages.rows.address
        self._rows = Job("rows", rows, self.call.address, after=0)
        self._few, self._many = Jobs([alone]), Jobs([self._rows, behind_rows])

    def start(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> InFlight:
        """Begins a call whose inputs have passed ``MoECall.check``; ``InFlight.result`` will be the
        number of active experts.

        Args:
            y: bf16 or float32 [T, H], contiguous.

        Raises:
            PykernelsError: the pool is closed, or the parent process's.
        """
        pool, call, words = self.pool, self.call, self._words
        rows = contiguous_rows(x)
        with pool.lock:
            pool.drain()  # before the descriptor and the workspace are written
            ids, weights = call.arrange(rows, ids, weights, y)
            words[_AT["ids"]], words[_AT["weights"]] = ids.data_ptr(), weights.data_ptr()
            needed = barrier_bytes(call.experts.shape.E, call.down_chunks) // 8
            if needed > len(self._barriers):
                self._barriers = np.zeros(needed + 8, np.int64)
                words[_AT["barriers"]] = (
                    self._barriers.ctypes.data + -self._barriers.ctypes.data % 64
                )
            self._rows.tasks = count = call.row_tasks
            buffers = self, rows, ids, weights, y
            return pool.publish(self._many if count else self._few, buffers, lambda: call.active)


def _offset(field: str) -> int:
    """Bytes from a ``MOE_ARGS``'s beginning."""
    return int(MOE_ARGS.fields[field][1])  # type: ignore[index]
