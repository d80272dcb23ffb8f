"""A model on the CPU, as the engine drives it: its programs on the workers' ring."""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np
import torch

from ...planning.compile import Compiled
from ...planning.drafts import BatchInvariance
from ...planning.execution import ExecutionPlan
from ...planning.lowerable import Lowerable
from ...planning.placement import CPU
from ...runner.batch import StepBatch, StepResult
from ...runner.paged_runner import PagedRunner
from ...workers.fence import make_fence
from ...workers.pool import WorkerPool
from .batch_invariance import batch_invariance
from .step import CpuExecutable
from .weights import layouts


class CpuRunner(PagedRunner):
    """See ``runner.batch.Runner``.

    Args:
        plan: all on the CPU.

    Raises:
        PykernelsError: no memory for the cache, or a kernel that cannot run here.
    """

    pool: WorkerPool
    _executable: CpuExecutable
    late_masks = True
    layouts = staticmethod(layouts)

    def __init__(self, model: Lowerable, plan: ExecutionPlan, pool: WorkerPool) -> None:
        super().__init__(model, plan)
        self.pool = pool
        self._give_up = np.zeros(1, np.int64)
        # On several nodes interleaved: attention is cut by sequences and runs of keys, so any
        # worker reads any page; none has a node of its own, and no memory controller is idle.
        self.caches = {
            name: pool.memory.allocate(part.nbytes).view(part.dtype).view(part.shape)
            for name, part in model.caches(*plan.sizes.of_caches).items()
        }

    def bind(self, batch: StepBatch) -> None:
        super().bind(batch)
        make_fence()  # compiled now, not between two tokens

    @property
    def batch_invariance(self) -> BatchInvariance:
        return batch_invariance(self.compiled().parts[CPU], self.plan.kernel)

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CpuExecutable:
        return CpuExecutable(
            compiled.parts[CPU],
            self.weights,
            self.pool,
            inputs,
            self.caches,
            self.plan.kernel,
            self.sizes,
        )

    def launch_behind(self, batch: StepBatch, ends: Set[int]) -> bool:
        staged_batch = self._batch
        # Tables must not change under the running step: a page may have been given for another one.
        same = (
            staged_batch.version == batch.version
            and staged_batch.tables_version == batch.tables_version
        )
        if not same or self.pool.closed:
            return False
        self._give_up[0] = 0
        step = self._executable
        return step.launch_behind(
            staged_batch.every, batch.every, staged_batch.S, ends, self._give_up
        )

    def give_up_next(self) -> None:
        self._give_up[0] = 1

    def result(self) -> StepResult:
        result = super().result()
        drawn = self._executable.next_runs()
        self.next_runs = self._running = drawn is not None
        return result if drawn is None else StepResult(drawn)
