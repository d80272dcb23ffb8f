"""A model on a device as the engine drives it: programs of a few sizes over one paged cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from pykernels.errors import PykernelsError

from ..engine.batch import StepBatch, StepResult
from ..kv_cache.layout import PAGE, Part
from ..profiling.step_bytes import weight_bytes
from ..program import Program
from .sampling import SamplingInputs

BUCKETS = 8, 64
"""Tokens of the programs beside that of the whole budget: one pass of tiles; many answers."""

Pass = Callable[[Program], Program]
"""Rewrites a program (``runtime.passes``)."""


class Lowered(Protocol):
    """A model's weights, from which programs are made."""

    @property
    def name(self) -> str:
        """Of its architecture."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""

    def caches(self, pages: int) -> Mapping[str, Part]:
        """The cache's buffers."""

    def lower(self, T: int, S: int, R: int, pages: int, table_pages: int) -> Program:
        """The program of a step of at most T tokens of S sequences, R of them sampled."""


class Step(Protocol):
    """A program bound to memory."""

    @property
    def program(self) -> Program:
        """What it runs."""

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the "output" buffers."""

    def run(self) -> None:
        """One step."""


class PagedRunner(ABC):
    """What the runners of all devices share: how a batch is arranged, which program runs it.

    A device says how a program becomes a step (``make_step``), and what it needs before one.

    Args:
        max_context: positions that the model was made for, or fewer.
        num_pages: of the cache; None: ``max_context`` for one sequence, and as much again.
        max_tokens: the token budget of a step.
        max_rows: of logits in a step; None: one a sequence. Prompt logprobs take one a token.
        passes: rewrite the programs of decode steps, those in which every sequence has one token;
            steps with a piece of a prompt run their programs as they were lowered.
    """

    page_size = PAGE

    def __init__(
        self,
        model: Lowered,
        max_context: int,
        num_pages: int | None,
        max_tokens: int,
        max_sequences: int,
        passes: Sequence[Pass] = (),
        max_rows: int | None = None,
    ) -> None:
        self.model, self.passes = model, tuple(passes)
        self.max_context, self.max_tokens = max_context, max(max_tokens, max_sequences)
        self.max_sequences, self.vocab_size = max_sequences, model.vocab_size
        self.max_rows = min(max(max_rows or 0, max_sequences), self.max_tokens)
        self.num_pages = num_pages or 2 * -(-max_context // PAGE)
        self.steps: list[Step] = []
        self.decode_steps: list[Step] = []
        self.sizes = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._sequences = np.zeros(self.max_tokens, np.int64)
        self._query_lengths = np.zeros(self.max_sequences, np.int64)
        self._version = -1
        self._results: dict[int, StepResult] = {}

    def lowered(self, *sizes: int) -> Program:
        """The model's program of these sizes for this device."""
        return self.model.lower(*sizes)

    @abstractmethod
    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Step:
        """The program on this device, over the runner's caches and ``sizes``."""

    def bind(self, batch: StepBatch) -> None:
        """Makes the programs over the batch's arrays, and compiles what they need."""
        arrays = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "slots": batch.slots,
            "sequences": self._sequences,
            "page_table": batch.page_tables,
            "sampled": batch.sampled,
            "query_starts": batch.starts[:-1],
            "query_lengths": self._query_lengths,
            "lengths": batch.lengths,
            "page_rows": batch.rows,
        }
        self._sampling = SamplingInputs(batch)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        inputs |= self._sampling.tensors()
        sizes = sorted({*(b for b in BUCKETS if b < self.max_tokens), self.max_tokens})
        self.steps = [self._step(T, inputs, ()) for T in sizes]
        self.decode_steps = self.steps
        if self.passes:
            enough = next(T for T in sizes if self.max_sequences <= T)
            self.decode_steps = [
                self._step(T, inputs, self.passes) for T in sizes if T <= enough
            ]  # fmt: skip

    def _step(self, T: int, inputs: Mapping[str, torch.Tensor], passes: Sequence[Pass]) -> Step:
        rows = min(T, self.max_rows)
        pages = inputs["page_table"].shape[1]
        program = self.lowered(T, self.max_sequences, rows, self.num_pages, pages)
        for rewrite in passes:
            program = rewrite(program)
        step = self.make_step(program, inputs)
        out = {name: tensor.numpy() for name, tensor in step.outputs.items()}
        self._results[id(step)] = StepResult(
            out["drawn"], out["logprobs"], out["top_ids"], out["top_logprobs"]
        )
        return step

    @property
    def weight_bytes(self) -> int:
        """That a step of one token reads."""
        return weight_bytes(self.decode_steps[0].program)

    @torch.inference_mode()  # where the model was loaded in it, tensors can be changed in it only
    def step(self, batch: StepBatch) -> StepResult:
        """One forward step, and a token for each row.

        Raises:
            TaskError: a task failed.
        """
        if batch.version != self._version:
            self._arrange(batch)
            self._version = batch.version
        self._sampling.refresh()
        steps = self.decode_steps if batch.T == batch.S else self.steps
        step = next(step for step in steps if batch.T <= step.program.sizes["T"])
        step.run()
        return self._results[id(step)]

    def _arrange(self, batch: StepBatch) -> None:
        """Which sequence each token is of, and how each row is sampled."""
        T, S, R = batch.T, batch.S, batch.R
        if self.max_tokens < T or self.max_sequences < S or self.max_rows < R:
            raise PykernelsError(
                f"a step of {T} tokens of {S} sequences, {R} rows drawn", "Make a larger runner"
            )
        self.sizes[0], self.sizes[1], self.sizes[2] = T, S, R
        counts = self._query_lengths[:S]
        counts[:] = np.diff(batch.starts[: S + 1])
        self._sequences[:T] = np.repeat(batch.rows[:S], counts)
        self._sampling.arrange(batch.sampling[:R])
