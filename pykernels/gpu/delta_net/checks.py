"""What the ops of gated delta nets ask of their inputs."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ...shapes import StateBatch
from ..common.launch import FLOATS


def check_floats(
    name: str, x: torch.Tensor, *shape: int, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Whether it is of that shape and a dtype of these, without gaps in its last dimension.

    Raises:
        PykernelsError: it is not.
    """
    if x.dtype not in dtypes or x.shape != shape:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise PykernelsError(
            f"{name} is {x.dtype} {tuple(x.shape)}", f"Give {kinds} of shape {shape}"
        )
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise PykernelsError(f"{name} has gaps in its last dimension", "Make it contiguous")


def check_states(state: torch.Tensor, batch: StateBatch, *sizes: int) -> None:
    """Whether the states are contiguous float32 [slots, *sizes], beside their batch.

    Raises:
        PykernelsError: they are not.
    """
    check_floats("state", state, *state.shape[:1], *sizes, dtypes=(torch.float32,))
    if not state.is_contiguous():
        raise PykernelsError("the state has gaps", "It is written in place: give it contiguous")
    if batch.slots.device != state.device:
        raise PykernelsError(
            f"the batch lies on {batch.slots.device}, the state on {state.device}",
            "Move them to one GPU",
        )
