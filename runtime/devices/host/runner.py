"""A model on the host device, as the engine drives it: exact and slow, what others are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...program import Program
from ...workers.pool import WorkerPool
from ..runner import Lowered, PagedRunner, Pass
from .step import HostStep

_EXACT = {torch.bfloat16: torch.float32}


def on_host(program: Program) -> Program:
    """The program with every node on the host device, and float32 for bfloat16 in the cache."""
    return replace(
        program.on("host"),
        buffers={
            name: replace(buffer, dtype=_EXACT.get(buffer.dtype, buffer.dtype))
            for name, buffer in program.buffers.items()
        },
    ).check()


class HostRunner(PagedRunner):
    """See ``engine.batch.Runner``: the reference ops in float32, the cache too where it would be
    bfloat16.

    Args:
        pool: for programs that hand experts to the ``cpu`` device, in the kernels' precision.
        passes: of ``runtime.passes``, for the programs of decode steps; ``offload`` is one.
    """

    def __init__(
        self,
        model: Lowered,
        max_context: int,
        num_pages: int | None = None,
        max_tokens: int = 512,
        max_sequences: int = 16,
        passes: Sequence[Pass] = (),
        pool: WorkerPool | None = None,
        max_rows: int | None = None,
    ) -> None:
        super().__init__(model, max_context, num_pages, max_tokens, max_sequences, passes, max_rows)
        self.pool = pool
        self.caches = {
            name: replace(part, dtype=_EXACT.get(part.dtype, part.dtype)).zeros()
            for name, part in model.caches(self.num_pages).items()
        }

    def lowered(self, *sizes: int) -> Program:
        return on_host(super().lowered(*sizes))

    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> HostStep:
        return HostStep(program, inputs, self.caches, self.pool, sizes=self.sizes)
