"""The results of a step: written on the GPU, read on the host; one pinned block, one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

ALIGNED = 16
"""Bytes: a result begins at a multiple, as Triton's vectors want."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""By buffer, its largest shape and its dtype."""


class StepOutputs:
    """Results of sampling, which all programs of a runner share.

    Attributes:
        tensors: by buffer, on the GPU; they stay until the next step has written its own, so a
            step may read the tokens that the one before has drawn.
        host: the same on the CPU, valid when ``receive`` has run.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        nbytes = sum(_bytes(*shape) for shape in shapes.values())
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host = torch.zeros(
            nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )
        self.tensors, self.host = _views(self._device, shapes), _views(self._host, shapes)

    def receive(self) -> None:
        """A launch, the last of a step: copies the results to the host."""
        self._host.copy_(self._device, non_blocking=True)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


def _views(block: torch.Tensor, shapes: Shapes) -> dict[str, torch.Tensor]:
    found, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        raw = block[at : at + math.prod(shape) * dtype.itemsize]
        found[name] = raw.view(dtype).view(shape)
        at += _bytes(shape, dtype)
    return found
