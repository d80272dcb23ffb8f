"""The inputs of a step on the GPU: one pinned block, one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from ..sampling import SamplingInputs
from .sampling_inputs import SamplingColumns, SamplingTables

ON_GPU = ("tokens", "positions", "slot_mapping", "sequences", "page_table", "logits_indices")
"""Inputs that nodes read, besides those of sampling."""
KEY_LENGTHS = "key_lengths"
_ALIGNED = 4  # int32 numbers: 16 bytes


class StepInputs:
    """Copies of the engine's arrays, as words of 32 bits.

    Args:
        arrays: by name, int64 CPU tensors that the engine writes before each step.
        sampling: how rows are sampled, for the same GPU.

    Attributes:
        tensors: by name, the views on the GPU, in their largest shape; ``KEY_LENGTHS`` [T] holds
            the keys that each token attends to, 0 for padding.
    """

    def __init__(
        self, arrays: Mapping[str, torch.Tensor], sampling: SamplingInputs, device: torch.device
    ) -> None:
        self._arrays = {name: arrays[name].numpy() for name in ON_GPU}
        self._sampling = SamplingColumns(sampling, len(self._arrays["logits_indices"]))
        self._tables = SamplingTables(sampling, device)
        shapes = {name: tuple(arrays[name].shape) for name in ON_GPU}
        shapes |= {KEY_LENGTHS: shapes["positions"], **self._sampling.shapes}
        starts, end = {}, 0
        for name, shape in shapes.items():
            starts[name] = end
            end += -(-math.prod(shape) // _ALIGNED) * _ALIGNED
        self._host = torch.zeros(
            end, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        staged, self.tensors = (
            {
                name: block[starts[name] : starts[name] + math.prod(shape)].view(shape)
                for name, shape in shapes.items()
            }
            for block in (self._host, self._device)
        )
        self._staged = {name: tensor.numpy() for name, tensor in staged.items()}
        self.tensors |= self._sampling.views(self.tensors) | self._tables.tensors

    def send(self, T: int, S: int, R: int, bucket: int) -> None:
        """Copies a step's inputs, padded to ``bucket`` tokens: slots of -1, no keys.

        The block is free again when the step's results are there.
        """
        staged = self._staged
        for name, array in self._arrays.items():
            most = {"page_table": len(array), "logits_indices": R}.get(name, T)
            staged[name][:most] = array[:most]
        staged["slot_mapping"][T:bucket] = -1
        staged["sequences"][T:bucket] = 0
        staged["logits_indices"][R:] = 0
        np.add(staged["positions"][:T], 1, out=staged[KEY_LENGTHS][:T])
        staged[KEY_LENGTHS][T:bucket] = 0
        self._sampling.stage(staged)
        self._tables.send()
        self._device.copy_(self._host, non_blocking=True)
