"""Weights in the format that a rule asks for, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pykernels.quant import Weight, get_format

from ..modules.linear import Linear
from .weights import Source


class Converted:
    """A source whose matrices that are linears of ours come in the formats of their rules.

    Args:
        linears: by the names of their weights (``modules.linear.linears``).
    """

    def __init__(self, source: Source, linears: Mapping[str, Linear]) -> None:
        self._source, self._linears = source, linears

    def matrix(self, name: str) -> tuple[str, Weight]:
        stored, weight = self._source.matrix(name)
        linear = self._linears.get(name)
        wanted = stored if linear is None else linear.packed_format(stored)
        if wanted == stored:
            return stored, weight
        return wanted, get_format(wanted).quantize(get_format(stored).dequantize(weight))

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        return self._source.stack(name)

    def tensor(self, name: str) -> torch.Tensor | None:
        return self._source.tensor(name)
