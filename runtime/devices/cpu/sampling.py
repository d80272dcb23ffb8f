"""How a step's rows are drawn, as sampling's tasks read it: a block of columns."""

from __future__ import annotations

import numpy as np

from pykernels.cpu.sampling import parameter_dtype, point_at_parameters

from ...engine.batch import SequenceSampling, StepBatch

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition",
    "presence_penalty": "presence",
    "frequency_penalty": "frequency",
}
"""Fields of ``SamplingParams``, and the columns that hold them."""


class SamplingBlock:
    """The parameters of up to R rows; greedy until it is told otherwise.

    Seeds and draws are read where the engine's batch has them (``bind``), so a step that goes on
    as the last one changes nothing here, but the count of seen tokens where there are penalties.
    """

    def __init__(self, R: int) -> None:
        self.R = R
        self._block = np.zeros(1, parameter_dtype(R))
        self.columns = self._block[0]
        for name in ("top_p", "repetition"):
            self.columns[name][:] = 1
        self.columns["logprobs"][:] = -1
        self._at: dict[str, int] = {}
        self._penalized: list[tuple[int, SequenceSampling]] = []

    def bind(self, batch: StepBatch) -> None:
        """Reads seeds and draws from the engine's batch."""
        self._at = {"seed": batch.seeds.ctypes.data, "draws": batch.draws.ctypes.data}

    def point_at(self, job: np.ndarray) -> None:
        """Tells a ``SAMPLING`` record where the columns are."""
        point_at_parameters(job, self.columns)
        for name, address in self._at.items():
            job[name] = address

    def arrange(self, sampling: list[SequenceSampling]) -> None:
        """Writes the rows of a batch whose sequences have changed."""
        columns = self.columns
        self._penalized = []
        for row, one in enumerate(sampling):
            params = one.params
            for field, name in _NAMES.items():
                columns[name][row] = getattr(params, field)
            columns["logprobs"][row] = -1 if params.logprobs is None else params.logprobs
            columns["bias_count"][row] = len(one.bias_ids)
            columns["bias_ids"][row] = one.bias_ids.ctypes.data
            columns["bias"][row] = one.bias_values.ctypes.data
            columns["seen_count"][row] = 0
            if one.counts is not None:
                columns["seen"][row] = one.counts.ids.ctypes.data
                columns["counts"][row] = one.counts.counts.ctypes.data
                self._penalized.append((row, one))

    def refresh(self) -> None:
        """Before each step: how many tokens each penalized row has seen."""
        for row, one in self._penalized:
            assert one.counts is not None
            self.columns["seen_count"][row] = one.counts.size
