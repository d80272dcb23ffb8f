"""Text through a decode program, token by token: what each position's distribution says of it.

Teacher-forced: whatever the program would have drawn, the text's own token comes next. Every
token is one of an answer: what is done to those alone (Expert Deferral) is seen at every position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.devices.cpu.step import CpuExecutable
from runtime.planning.compile import Compiled
from runtime.planning.placement import CPU
from runtime.program import Program
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import HAS_STATE, STATE_SLOTS, allocate_inputs

from ..llm import LLM

LANES = 8
"""Sequences side by side: the tokens of one pass of tiles."""
PAGE = 64


@dataclass(frozen=True)
class Scores:
    """Scores of D sequences of L tokens.

    Attributes:
        bits: float64 [D, L - 1], ``-log2`` of the probability of each token but the first.
        likeliest: int64 [D, L - 1], the token that greedy decoding would have drawn there.
    """

    bits: Tensor
    likeliest: Tensor


class Teacher:
    """Runs texts of one length through decode programs of a model.

    Args:
        documents: int64 [D, L] token ids.
    """

    def __init__(self, llm: LLM, documents: Tensor) -> None:
        self._llm, self.documents = llm, documents
        self._pages = -(-documents.shape[1] // PAGE)  # of a sequence

    def program(self) -> Program:
        """A decode step of ``LANES`` sequences."""
        model = self._llm.runner.model
        pages = LANES * self._pages, self._pages
        return model.lower(StepSizes(LANES, LANES, LANES, *pages, state_slots=LANES))

    def score(self, program: Program, progress: Callable[[int], None] = lambda _: None) -> Scores:
        """All documents through a program, made by a pass from ``program()``.

        Args:
            progress: called with the number of tokens after every position.
        """
        tables = torch.arange(LANES * self._pages, dtype=torch.int64, device="cpu")
        tables = tables.view(LANES, self._pages)
        inputs = allocate_inputs(program) | {"page_table": tables}
        numbered = ("sequences", "logits_indices", "query_starts", "page_rows", STATE_SLOTS)
        for name in inputs.keys() & numbered:
            inputs[name][:] = torch.arange(LANES, dtype=torch.int64, device="cpu")
        inputs["query_lengths"][:] = 1
        parts = self._llm.runner.model.caches(LANES * self._pages, LANES)
        caches = {name: part.zeros() for name, part in parts.items()}
        part = Compiled.of(program, self._llm.pool.memory).parts[CPU]
        step = CpuExecutable(
            part, self._llm.runner.weights, self._llm.pool, inputs, caches, self._llm.kernel
        )
        D, L = self.documents.shape
        bits = torch.zeros(D, L - 1, dtype=torch.float64, device="cpu")
        likeliest = torch.zeros(D, L - 1, dtype=torch.int64, device="cpu")
        for first in range(0, D, LANES):
            rows = self.documents[first : first + LANES]
            n = len(rows)
            step.sizes[:] = n
            for at in range(L - 1):
                inputs["tokens"][:n] = rows[:, at]
                inputs["positions"][:], inputs["lengths"][:] = at, at + 1
                if HAS_STATE in inputs:
                    inputs[HAS_STATE][:] = at > 0
                inputs["slot_mapping"][:] = tables[:, at // PAGE] * PAGE + at % PAGE
                step.run()
                logits = step.outputs["logits"][:n].double()
                own = logits.gather(1, rows[:, at + 1 : at + 2])[:, 0]
                bits[first : first + n, at] = (logits.logsumexp(-1) - own) / math.log(2)
                likeliest[first : first + n, at] = logits.argmax(-1)
                progress(n)
        return Scores(bits, likeliest)
