"""The inputs of two microbatches, copied from those of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..program.sizes import MICROBATCHES, microbatch_name, microbatch_tokens
from ..program.step_inputs import HAS_STATE, IS_PROMPT, STATE_SLOTS, WINDOW_SLOTS

_BY_TOKEN = ("tokens", "positions", IS_PROMPT, "slot_mapping", WINDOW_SLOTS, "sequences")
_STATES = STATE_SLOTS, HAS_STATE
_BY_SEQUENCE = ("query_starts", "query_lengths", "lengths", "page_rows", *_STATES)


class MicrobatchInputs:
    """Inputs of decode steps by microbatch.

    Args:
        inputs: by name, int64 tensors of a whole step, which are written before each one.

    Attributes:
        tensors: by a microbatch's own names.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        names = [name for name in (*_BY_TOKEN, *_BY_SEQUENCE) if name in inputs]
        self._whole = {name: inputs[name].numpy() for name in names}
        self._own = {
            microbatch_name(microbatch, name): np.zeros_like(array)
            for microbatch in MICROBATCHES
            for name, array in self._whole.items()
        }
        self.tensors = {name: torch.from_numpy(array) for name, array in self._own.items()}

    def send(self, T: int) -> None:
        """Copies those of a decode step of T tokens."""
        start = 0
        for microbatch, count in zip(MICROBATCHES, microbatch_tokens(T), strict=True):
            for name, whole in self._whole.items():
                first = start if name == "query_starts" else 0  # which is counted in the microbatch
                buffer = self._own[microbatch_name(microbatch, name)]
                buffer[:count] = whole[start : start + count] - first
            start += count
