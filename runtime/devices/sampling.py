"""How a step's rows are sampled, as inputs of ``sample_requests``: a column for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..engine.batch import SequenceSampling, StepBatch
from ..ops import SAMPLING
from ..step_inputs import sampling_dtype

_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}
"""Columns, and the fields of ``SamplingParams`` that they hold."""


class SamplingInputs:
    """The parameters of the rows of a batch.

    Seeds and draws are read where the engine's batch has them, so a step that goes on as the last
    one changes nothing here but the count of seen tokens, where there are penalties. Lists stay in
    the engine's memory; the columns hold their addresses.
    """

    def __init__(self, batch: StepBatch) -> None:
        R = len(batch.seeds)
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(R, str(sampling_dtype(name)).removeprefix("torch.")) for name in SAMPLING
        }
        self._columns |= {"seed": batch.seeds, "draws": batch.draws}
        self._penalized: list[tuple[int, SequenceSampling]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of input buffers, tensors over the columns."""
        return {f"sampling.{n}": torch.from_numpy(values) for n, values in self._columns.items()}

    def arrange(self, sampling: Sequence[SequenceSampling]) -> None:
        """Writes the rows of a batch whose sequences have changed."""
        columns = self._columns
        self._penalized = []
        for row, sequence in enumerate(sampling):
            params = sequence.params
            for name, field in _PARAMS.items():
                columns[name][row] = getattr(params, field)
            columns["num_logprobs"][row] = -1 if params.logprobs is None else params.logprobs
            columns["bias_count"][row] = len(sequence.bias_ids)
            columns["bias_ids"][row] = sequence.bias_ids.ctypes.data
            columns["bias"][row] = sequence.bias_values.ctypes.data
            columns["mask"][row] = 0 if sequence.mask is None else sequence.mask.ctypes.data
            columns["seen_count"][row] = 0
            if sequence.counts is not None:
                columns["seen"][row] = sequence.counts.ids.ctypes.data
                columns["counts"][row] = sequence.counts.counts.ctypes.data
                self._penalized.append((row, sequence))

    def refresh(self) -> None:
        """Before each step: how many tokens each penalized row has seen."""
        for row, sequence in self._penalized:
            assert sequence.counts is not None
            self._columns["seen_count"][row] = sequence.counts.size
