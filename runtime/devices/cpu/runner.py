"""A model on the CPU, as the engine drives it: programs of a few sizes over one paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from pykernels.errors import PykernelsError

from ...engine.batch import StepBatch, StepResult
from ...machine.memory import allocate
from ...profiling.step_bytes import weight_bytes
from ...program import Program
from ...workers.pool import WorkerPool
from .sampling import SamplingBlock
from .step import CpuStep

PAGE = 64
BUCKETS = 8, 64
"""Tokens of the programs beside that of the whole budget: one pass of tiles; many answers."""


class Lowered(Protocol):
    """A model's weights, from which programs are made."""

    @property
    def name(self) -> str:
        """Of its architecture."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""

    def caches(self, pages: int) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the cache's buffers (bfloat16)."""

    def lower(self, T: int, S: int, R: int, pages: int, table_pages: int) -> Program:
        """The program of a step of at most T tokens of S sequences, R of them sampled."""


def cache_bytes(model: Lowered, pages: int) -> int:
    """Memory of a cache of so many pages."""
    return sum(2 * int(np.prod(shape)) for shape in model.caches(pages).values())


class CpuRunner:
    """See ``engine.batch.Runner``.

    Args:
        max_context: positions that the model was made for, or fewer.
        num_pages: of the cache; None: ``max_context`` for one sequence, and as much again.
        max_tokens: the token budget of a step.
        kernel: a backend of ``pykernels.registry``, or "auto".

    Raises:
        PykernelsError: no memory for the cache, or a kernel that cannot run here.
    """

    page_size = PAGE

    def __init__(
        self,
        model: Lowered,
        pool: WorkerPool,
        max_context: int,
        num_pages: int | None = None,
        max_tokens: int = 512,
        max_sequences: int = 16,
        kernel: str = "auto",
    ) -> None:
        self.model, self.pool, self.kernel = model, pool, kernel
        self.max_context, self.max_tokens = max_context, max(max_tokens, max_sequences)
        self.max_sequences, self.vocab_size = max_sequences, model.vocab_size
        self.num_pages = num_pages or 2 * -(-max_context // PAGE)
        self.caches = {
            name: allocate(2 * int(np.prod(shape))).view(torch.bfloat16).view(shape)
            for name, shape in model.caches(self.num_pages).items()
        }
        self.steps: list[CpuStep] = []
        self._sizes = torch.zeros(3, dtype=torch.int64)
        self._sequences = np.zeros(self.max_tokens, np.int64)
        self._sampled = np.zeros(max_sequences, np.int64)
        self._version = -1
        self._parameters = SamplingBlock(max_sequences)
        self._results: dict[int, StepResult] = {}

    def bind(self, batch: StepBatch) -> None:
        """Makes the programs over the batch's arrays, and compiles what they need."""
        arrays = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "slots": batch.slots,
            "sequences": self._sequences,
            "page_table": batch.page_tables,
            "sampled": self._sampled,
        }
        self._parameters.bind(batch)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        table_pages = batch.page_tables.shape[1]
        for T in sorted({*(b for b in BUCKETS if b < self.max_tokens), self.max_tokens}):
            rows = min(T, self.max_sequences)
            program = self.model.lower(T, self.max_sequences, rows, self.num_pages, table_pages)
            step = CpuStep(
                program, self.pool, inputs, self.caches, self.kernel, self._sizes,
                self._parameters,
            )  # fmt: skip
            self.steps.append(step)
            out = {name: tensor.numpy() for name, tensor in step.outputs.items()}
            self._results[id(step)] = StepResult(
                out["drawn"], out["logprobs"], out["top_ids"], out["top_logprobs"]
            )

    @property
    def weight_bytes(self) -> int:
        """That a step of one token reads."""
        return weight_bytes(self.steps[0].program)

    def step(self, batch: StepBatch) -> StepResult:
        """One forward step, and a token for each sampled sequence.

        Raises:
            TaskError: a task failed.
        """
        if batch.version != self._version:
            self._arrange(batch)
            self._version = batch.version
        step = next(step for step in self.steps if batch.T <= step.program.sizes["T"])
        self._parameters.refresh()
        step.run()
        return self._results[id(step)]

    def _arrange(self, batch: StepBatch) -> None:
        """Which sequence each token is of, and which tokens are sampled."""
        T, S, R = batch.T, batch.S, batch.R
        if self.max_tokens < T or self.max_sequences < S:
            raise PykernelsError(f"a step of {T} tokens of {S} sequences", "Make a larger runner")
        self._sizes[0], self._sizes[1], self._sizes[2] = T, S, R
        counts = np.diff(batch.starts[: S + 1])
        self._sequences[:T] = np.repeat(batch.rows[:S], counts)
        self._sampled[:R] = batch.starts[1 : R + 1] - 1
        self._parameters.arrange(batch.sampling[:R])
