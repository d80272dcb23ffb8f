"""Copies states from slot to slot, of all layers in one launch: a fork or a snapshot of a model
with 36 layers of two states would be 72."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.launch import check_device

_BLOCK = 4096


@triton.jit(do_not_specialize=["source", "target"])
def _copy_states(addresses, sizes, source, target, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    state = tl.load(addresses + i).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + i)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK < size:
        value = tl.load(state + source * size + at, mask=at < size)
        tl.store(state + target * size + at, value, mask=at < size)


class StateCopies:
    """Copies between the slots of states on one GPU.

    Args:
        states: float32 [slots, ...] each, contiguous, of as many slots.

    Raises:
        PykernelsError: they are not.
    """

    def __init__(self, states: Sequence[torch.Tensor]) -> None:
        for state in states:
            if state.dtype != torch.float32 or not state.is_contiguous():
                raise PykernelsError(
                    f"a state is {state.dtype}, of strides {state.stride()}",
                    "Give contiguous float32",
                )
        if len({len(state) for state in states}) > 1:
            raise PykernelsError("states of unlike numbers of slots", "Give as many of each")
        self._states = tuple(states)  # which stay where they are
        sizes = [state[0].numel() for state in states]
        self._grid = len(states), triton.cdiv(max(sizes, default=0), _BLOCK)
        self.device = check_device(*states) if states else torch.device("cpu")
        self._addresses, self._sizes = (
            torch.tensor(numbers, dtype=torch.int64, device=self.device)
            for numbers in ([state.data_ptr() for state in states], sizes)
        )

    def copy(self, source: int, target: int) -> None:
        """The state of a slot to another one, in one launch."""
        if not self._states:
            return
        arrays = self._addresses, self._sizes
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            _copy_states[self._grid](*arrays, source, target, BLOCK=_BLOCK, num_warps=8)
