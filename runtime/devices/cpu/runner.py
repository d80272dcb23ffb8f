"""A model on the CPU, as the engine drives it: its programs on the workers' ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...machine.memory import allocate
from ...program import Program
from ...workers.pool import WorkerPool
from ..runner import Lowered, PagedRunner, Pass
from .step import CpuStep


class CpuRunner(PagedRunner):
    """See ``engine.batch.Runner``.

    Args:
        max_context: positions that the model was made for, or fewer.
        num_pages: of the cache; None: ``max_context`` for one sequence, and as much again.
        max_tokens: the token budget of a step.
        max_rows: of logits in a step; None: one a sequence.
        kernel: a backend of ``pykernels.registry``, or "auto".
        passes: of ``runtime.passes``, for the programs of decode steps.

    Raises:
        PykernelsError: no memory for the cache, or a kernel that cannot run here.
    """

    def __init__(
        self,
        model: Lowered,
        pool: WorkerPool,
        max_context: int,
        num_pages: int | None = None,
        max_tokens: int = 512,
        max_sequences: int = 16,
        kernel: str = "auto",
        passes: Sequence[Pass] = (),
        max_rows: int | None = None,
    ) -> None:
        super().__init__(model, max_context, num_pages, max_tokens, max_sequences, passes, max_rows)
        self.pool, self.kernel = pool, kernel
        self.caches = {
            name: allocate(part.nbytes).view(part.dtype).view(part.shape)
            for name, part in model.caches(self.num_pages).items()
        }

    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> CpuStep:
        return CpuStep(program, self.pool, inputs, self.caches, self.kernel, self.sizes)
