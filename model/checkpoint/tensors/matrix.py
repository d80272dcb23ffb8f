"""Where one tensor of a model is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .safetensors import Checkpoint, TensorSlice


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where one tensor is stored: its values and, if it is quantized, its scales.

    Attributes:
        shape: of the dequantized tensor.
        fmt: its format in `pykernels.quant`, None for floats.
        zero: zero points (`zero_points`).
        order: the group of each input, where that is stored.
        layout: how codes with zero points lie: "awq", "gptq" or "gptq_v2"; of `nvfp4`.
        whole: a second scale, of the whole matrix (`nvfp4`).
        symmetric: all zero points are the same one.
        transposed: what is stored is [K, N].
        pick: of rows that two matrices share in turns, the even (0) or the odd ones (1).
    """

    data: TensorSlice
    shape: tuple[int, ...]
    scale: TensorSlice | None = None
    fmt: str | None = None
    zero: TensorSlice | None = None
    order: TensorSlice | None = None
    layout: str = ""
    symmetric: bool = False
    transposed: bool = False
    pick: int | None = None
    whole: TensorSlice | None = None

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """Its part of the floats that were read."""
        rows = stored.T if self.transposed else stored
        return (rows if self.pick is None else rows[self.pick :: 2]).contiguous()

    @property
    def parts(self) -> list[TensorSlice]:
        """All that is stored of it."""
        every = (self.data, self.scale, self.zero, self.order, self.whole)
        return [part for part in every if part is not None]


class Lookup(Protocol):
    """What finding a matrix asks of `names.Names`."""

    checkpoint: Checkpoint
    stored: dict[str, str]

    @property
    def quantization(self) -> dict[str, Any]:
        """The checkpoint's `quantization_config`."""

    def companion(self, key: str, suffix: str) -> TensorSlice | None:
        """The tensor `key + suffix` that `key` needs; None if it is missing (noted)."""
