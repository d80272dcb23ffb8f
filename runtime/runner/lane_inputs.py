"""The inputs of two lanes, copied from those of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..program.sizes import LANES, lane_name, lane_tokens
from ..program.step_inputs import HAS_STATE, IS_PROMPT, STATE_SLOTS

_BY_TOKEN = ("tokens", "positions", IS_PROMPT, "slot_mapping", "sequences")
_STATES = STATE_SLOTS, HAS_STATE
_BY_SEQUENCE = ("query_starts", "query_lengths", "lengths", "page_rows", *_STATES)


class LaneInputs:
    """Inputs of decode steps by lane.

    Args:
        inputs: by name, int64 tensors of a whole step, which are written before each one.

    Attributes:
        tensors: by a lane's own names.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        names = [name for name in (*_BY_TOKEN, *_BY_SEQUENCE) if name in inputs]
        self._whole = {name: inputs[name].numpy() for name in names}
        self._own = {
            lane_name(lane, name): np.zeros_like(array)
            for lane in LANES
            for name, array in self._whole.items()
        }
        self.tensors = {name: torch.from_numpy(array) for name, array in self._own.items()}

    def send(self, T: int) -> None:
        """Copies those of a decode step of T tokens."""
        start = 0
        for lane, count in zip(LANES, lane_tokens(T), strict=True):
            for name, whole in self._whole.items():
                first = start if name == "query_starts" else 0  # which is counted in the lane
                own = self._own[lane_name(lane, name)]
                own[:count] = whole[start : start + count] - first
            start += count
