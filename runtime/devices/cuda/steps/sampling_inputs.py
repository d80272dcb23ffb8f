"""How rows are sampled, on the GPU: columns in the block of the step's inputs, tables beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pykernels.gpu.common.stream_memory import supports as why_no_flags

from ....program.ops import SAMPLING
from ....program.step_inputs import sampling_dtype
from ....runner.sampling import SamplingInputs

_LONG = ("seed", "draws")
_DTYPES = {
    name: torch.int64
    if name in _LONG
    else torch.float32
    if sampling_dtype(name) == torch.float32
    else torch.int32
    for name in SAMPLING
}
"""The dtypes of the columns on a GPU."""
_WORDS = {name: dtype.itemsize // 4 for name, dtype in _DTYPES.items()}
_NUMPY = {torch.int64: np.int64, torch.float32: np.float32, torch.int32: np.int32}


MASKS_WRITTEN = "sampling.masks_written"
"""Among a GPU's inputs, the flag for which its sampler waits; missing where no stream can."""


def waits_for_masks(device: torch.device) -> bool:
    """Whether a step on the GPU can begin before its masks are there."""
    return device.type == "cuda" and why_no_flags() is None


class SamplingColumns:
    """The columns of up to R rows, in a block of words of 32 bits that is staged for each step.

    Attributes:
        shapes: by buffer, the words that the block must have.
    """

    def __init__(self, sampling: SamplingInputs, R: int) -> None:
        self._sampling, self._R, self._version = sampling, R, -1
        self.shapes = {f"sampling.{name}": (R * words,) for name, words in _WORDS.items()}

    def views(self, block: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The columns [R] in their dtypes, of the words in a block on the GPU."""
        return {
            f"sampling.{name}": block[f"sampling.{name}"].view(dtype)
            for name, dtype in _DTYPES.items()
        }

    def stage(self, block: Mapping[str, np.ndarray], kept: bool = True) -> None:
        """Writes what has changed since the last step.

        Args:
            block: int32 words on the host.
            kept: nothing else was written there since.
        """
        sampling = self._sampling
        changed = SAMPLING if not kept or self._version != sampling.version else ("draws",)
        for name in changed:
            words = block[f"sampling.{name}"].view(_NUMPY[_DTYPES[name]])
            words[:] = sampling.columns[name][: self._R]
        self._version = sampling.version


class SamplingTables:
    """The tables: biases cross when the batch changes, only as far as rows have any. Masks stay in
    pinned memory, where the sampler reads them: they may be written when its step already runs.
    What penalties go by is on the GPU only.

    Attributes:
        tensors: by buffer.
    """

    def __init__(self, sampling: SamplingInputs, device: torch.device) -> None:
        self._sampling, self._version = sampling, -1
        self.tensors = {
            f"sampling.{name}": torch.zeros_like(table, device=device)
            for name, table in sampling.tables.items()
            if name != "mask"
        }
        self.tensors |= {"sampling.mask": sampling.tables["mask"], "sampling.seen": sampling.seen}
        if waits_for_masks(device):
            self.tensors[MASKS_WRITTEN] = sampling.masks_written

    def send(self) -> None:
        """Copies what the step needs; the tables are free again when its results are there."""
        sampling = self._sampling
        if self._version != sampling.version:
            self._version = sampling.version
            self._send("bias_ids", sampling.biases)
            self._send("bias", sampling.biases)

    def _send(self, name: str, count: int) -> None:
        if count:
            table = self.tensors[f"sampling.{name}"]
            table[:count].copy_(self._sampling.tables[name][:count], non_blocking=True)
