"""How a step's rows are sampled, as inputs of ``sample_requests``: columns and tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..program.step_inputs import allocate_columns, sampling_dtype, sampling_tables
from .batch import SequenceSampling, StepBatch
from .counts import TokenCounts

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


class SamplingBatch:
    """The parameters of the rows of a batch.

    Seeds and draws are read where the engine's batch has them, so a step that goes on as the last
    one changes nothing here but masks. What penalties go by is written once for a sequence, where
    the device has it; from then on ``sample_requests`` counts what it draws. If a sequence does not
    go on from there (it was preempted, say), it is written again.

    Args:
        V: logits of a row.
        S: sequences of a step.
        device: device of ``seen``. On a GPU it is written on the current stream.

    Attributes:
        columns: numpy arrays [R] by name; rows behind those of the batch take the likeliest token.
        tables: "bias_ids", "bias" and "mask" by name, pinned for a GPU; the first ``biases`` and
            ``masks`` of their entries are in use.
        seen: int32 [S, V] on the device.
        masks_written: int64 [1], pinned likewise: 1 when the masks are those of the step that was
            launched last, for which its sampler waits.
        version: grows when anything but seeds, draws, masks and ``seen`` has changed.
    """

    def __init__(self, batch: StepBatch, V: int, S: int, device: torch.device) -> None:
        R = len(batch.seeds)
        self.columns = {name: column.numpy() for name, column in allocate_columns(R).items()}
        self._neutral = {name: column[:1].copy() for name, column in self.columns.items()}
        self.columns |= {"seed": batch.seeds, "draws": batch.draws}
        shapes = sampling_tables(S, R, V)
        self.tables = {
            name: torch.zeros(
                shapes[name],
                dtype=sampling_dtype(name),
                device="cpu",
                pin_memory=device.type == "cuda",
            )
            for name in ("bias_ids", "bias", "mask")
        }
        self.masks_written = torch.ones(
            1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self._written = self.masks_written.numpy()
        self._bias_ids, self._bias, self._mask = (t.numpy() for t in self.tables.values())
        self.seen = torch.zeros(shapes["seen"], dtype=torch.int32, device=device)
        self.biases = self.masks = self.version = 0
        self._masked: list[np.ndarray] = []
        self._seen_rows: dict[TokenCounts, int] = {}
        self._free = list(range(S))
        self._drawn = [0] * S  # tokens of the output that a row of `seen` has counted
        self._penalized: list[int] = []  # rows of `seen` that the batch has

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors over columns and tables, by the names of input buffers."""
        columns = {name: torch.from_numpy(array) for name, array in self.columns.items()}
        arrays = {**columns, **self.tables, "seen": self.seen, "masks_written": self.masks_written}
        return {f"sampling.{name}": tensor for name, tensor in arrays.items()}

    def arrange(self, sampling: Sequence[SequenceSampling]) -> None:
        """Writes the rows of a batch whose sequences have changed; no step may be running."""
        columns, R = self.columns, len(sampling)
        self._forget({sequence.counts for sequence in sampling})
        self._penalized, self._masked, self.biases = [], [], 0
        for name, neutral in self._neutral.items():
            if name not in ("seed", "draws"):
                columns[name][:] = neutral
        for name, field in _PARAMS.items():
            columns[name][:R] = [getattr(sequence.params, field) for sequence in sampling]
        for row, sequence in enumerate(sampling):
            if (logprobs := sequence.params.logprobs) is not None:
                columns["num_logprobs"][row] = logprobs
            if row and sequence is sampling[row - 1]:  # behind a draft: the same biases
                for name in ("bias_start", "bias_count"):
                    columns[name][row] = columns[name][row - 1]
            elif count := len(sequence.bias_ids):
                at = slice(self.biases, self.biases + count)
                self._bias_ids[at], self._bias[at] = sequence.bias_ids, sequence.bias_values
                columns["bias_start"][row], columns["bias_count"][row] = self.biases, count
                self.biases += count
            if sequence.counts is not None:
                seen_row = self._seen_row(sequence.counts, int(columns["draws"][row]))
                columns["seen_row"][row] = seen_row
                self._penalized.append(seen_row)
            if sequence.mask is not None:
                columns["mask_row"][row] = len(self._masked)
                self._masked.append(sequence.mask)
        self.masks = len(self._masked)
        self.version += 1

    def write_masks(self) -> None:
        """The masks as they are now, for the step that waits for them, or before it begins."""
        for row, mask in enumerate(self._masked):
            self._mask[row] = mask
        self._written[0] = 1

    def delay_masks(self) -> None:
        """The next step waits for ``write_masks``, if it has masks."""
        self._written[0] = not self._masked

    def refresh(self) -> None:
        """Before each step: what it will count."""
        for seen_row in self._penalized:
            self._drawn[seen_row] += 1

    def _forget(self, counted: set[TokenCounts | None]) -> None:
        """Frees the rows of sequences that have left."""
        for counts in [counts for counts in self._seen_rows if counts not in counted]:
            self._free.append(self._seen_rows.pop(counts))

    def _seen_row(self, counts: TokenCounts, draws: int) -> int:
        """The row of ``seen`` of a sequence that has drawn so many tokens."""
        row = self._seen_rows.get(counts)
        if row is None:
            row = self._seen_rows[counts] = self._free.pop()
        elif self._drawn[row] == draws:
            return row
        ids, times = counts.ids[: counts.size], counts.counts[: counts.size]
        assert int(times.sum()) == draws, "the engine has not counted what was drawn"
        self._drawn[row] = draws
        where, words = torch.from_numpy(ids).long(), torch.from_numpy(np.maximum(2 * times, 1))
        self.seen[row].zero_()[where.to(self.seen.device)] = words.to(self.seen.device)
        return row
