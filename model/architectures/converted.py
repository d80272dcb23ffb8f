"""Weights in the format that a rule asks for, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pykernels.quant import Weight, get_format
from pykernels.quant.split import Experts

from ..modules.linear import Linear
from ..modules.moe import FusedMoE
from .weights import MakeExperts, Source


class Converted:
    """A source whose matrices that are linears of ours come in the formats of their rules.

    Args:
        linears: by the names of their weights (``modules.linear.linears``).
        changed: called with the name of a weight, its values and those that it has then (float32).
    """

    def __init__(
        self,
        source: Source,
        linears: Mapping[str, Linear],
        changed: Callable[[str, torch.Tensor, torch.Tensor], None] = lambda *_: None,
    ) -> None:
        self._source, self._linears, self._changed = source, linears, changed

    def matrix(self, name: str) -> tuple[str, Weight]:
        stored, weight = self._source.matrix(name)
        linear = self._linears.get(name)
        wanted = stored if linear is None else linear.packed_format(stored)
        if wanted == stored:
            return stored, weight
        values = get_format(stored).dequantize(weight)
        converted = get_format(wanted).quantize(values)
        self._changed(name, values, get_format(wanted).dequantize(converted))
        return wanted, converted

    def stack(self, name: str) -> tuple[str, list[Weight]] | None:
        return self._source.stack(name)

    def tensor(self, name: str) -> torch.Tensor | None:
        return self._source.tensor(name)

    def experts(self, module: FusedMoE, make: MakeExperts) -> Experts:
        return self._source.experts(module, make)
