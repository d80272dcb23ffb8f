"""The results of a step: written on the GPU, read on the host; one pinned block, one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....passes.keep_routing import routers
from ....program import Program
from ..memory.buffers import dtypes

ALIGNED = 16
"""Bytes: a result begins at a multiple, as Triton's vectors want."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""By buffer, its largest shape and its dtype."""


@dataclass(frozen=True)
class ProgramOutputs:
    """Results of one program on one GPU.

    Attributes:
        tensors: by buffer, on the GPU; ``host``: the same on the CPU, valid when ``receive`` has
            run.
    """

    tensors: Mapping[str, torch.Tensor]
    host: Mapping[str, torch.Tensor]
    _from: torch.Tensor
    _to: torch.Tensor

    def receive(self) -> None:
        """A launch, the last of the GPU's in a step: copies the results to the host."""
        self._to.copy_(self._from, non_blocking=True)


class StepOutputs:
    """Results of one GPU: of sampling, which all programs of a runner share, on the last GPU, and
    behind them a program's own.

    Those of sampling stay until the next step has written its own, so a step may read the tokens
    that the one before has drawn.

    Args:
        shapes: of what is shared.
        own: most bytes of one program's own, see ``nbytes``.
    """

    def __init__(self, shapes: Shapes, device: torch.device, own: int = 0) -> None:
        self._shapes, self._shared = shapes, nbytes(shapes)
        size = self._shared + own
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(
            size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )

    def of(self, own: Shapes) -> ProgramOutputs:
        """The shared results and a program's own ones."""
        end = self._shared + nbytes(own)
        assert end <= len(self._device), "the program's results are larger than was said"
        every = {**self._shapes, **own}
        on_gpu, on_host = self._device[:end], self._host[:end]
        return ProgramOutputs(_views(on_gpu, every), _views(on_host, every), on_gpu, on_host)


def kept_routing(program: Program, device: str) -> Shapes:
    """What a program keeps of the choices of a device's routers (``passes.keep_routing``)."""
    kinds = dtypes(program)
    return {
        name: (program.shape(name), kinds[name])
        for node in routers(program)
        if node.device == device
        for name in node.outputs.values()
    }


def kept_bytes(program: Program, device: str) -> int:
    """Bytes of that, in two lanes too, where there are twice as many results of half the rows."""
    shapes = kept_routing(program, device)
    return nbytes(shapes) + 2 * ALIGNED * len(shapes)


def nbytes(shapes: Shapes) -> int:
    """Bytes of results."""
    return sum(_bytes(*shape) for shape in shapes.values())


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


def _views(block: torch.Tensor, shapes: Shapes) -> dict[str, torch.Tensor]:
    found, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        raw = block[at : at + math.prod(shape) * dtype.itemsize]
        found[name] = raw.view(dtype).view(shape)
        at += _bytes(shape, dtype)
    return found
