"""Copies states from slot to slot: of all layers in one launch between steps, where a fork or a
snapshot of a model with 36 layers of two states would be 72; or within a step, of one of them."""

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


@triton.jit
def _save_states(state, slots, saved, size, BLOCK: tl.constexpr):
    s = tl.program_id(0)
    source, target = tl.load(slots + s).to(tl.int64), tl.load(saved + s).to(tl.int64)
    if (source >= 0) & (target >= 0):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(state + source * size + at, mask=at < size)
        tl.store(state + target * size + at, value, mask=at < size)


def save_states(state: torch.Tensor, slots: torch.Tensor, saved: torch.Tensor) -> None:
    """Copies states of a step's sequences to other slots. One launch, on the current GPU.

    Args:
        state: float32 [slots, ...], contiguous.
        slots: int32 [S] of each sequence; ``saved``: int32 [S], those that get a copy, all
            different and of no sequence of the step; where one of both is negative, none is made.

    Raises:
        PykernelsError: other dtypes or sizes, or no Triton for this device.
    """
    check_device(state, slots, saved)
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise PykernelsError(
            f"the state is {state.dtype}, of strides {state.stride()}", "Give contiguous float32"
        )
    if any(x.dtype != torch.int32 or x.shape != slots.shape[:1] for x in (slots, saved)):
        raise PykernelsError(
            f"slots {slots.dtype} {tuple(slots.shape)} and {saved.dtype} {tuple(saved.shape)}",
            "Give int32 [S] for both",
        )
    size = state[0].numel()
    if len(slots) and size:
        grid = len(slots), triton.cdiv(size, _BLOCK)
        _save_states[grid](state, slots, saved, size, BLOCK=_BLOCK, num_warps=8)


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
