"""Which experts a step's tokens used, as programs leave it behind (``passes.keep_routing``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..passes.keep_routing import kept_routers, routers
from ..program import Program
from ..program.node import STEP_SIZES
from .routing import LayerRouting, RoutedLayer

_Array = NDArray[Any]


def routed_layers(program: Program) -> list[RoutedLayer]:
    """The layers that choose experts, of a program without microbatches."""
    return [
        RoutedLayer(node.layer or 0, node.attr("experts"), node.attr("spec").topk)
        for node in routers(program)
    ]


class KeptRouting:
    """What each layer's router chose in the step that a bound program has ended last.

    Tokens of two microbatches are one behind the other, joined when somebody asks for them: nothing
    is copied in steps of which nobody does.

    Args:
        outputs: of the bound program, by buffer.
        sizes: the sizes of the step (``STEP_SIZES``), as they change.
    """

    def __init__(
        self, program: Program, outputs: Mapping[str, _Array], sizes: torch.Tensor
    ) -> None:
        self._sizes = sizes
        self._layers: dict[int | None, list[tuple[int, _Array, _Array]]] = {}
        for node in kept_routers(program):
            ids, weights = node.outputs["ids"], node.outputs["weights"]
            size = STEP_SIZES.index(str(program.buffers[ids].shape[0]))
            part = size, outputs[ids], outputs[weights]
            self._layers.setdefault(node.layer, []).append(part)

    def __iter__(self) -> Iterator[LayerRouting]:
        sizes = self._sizes.tolist()
        for microbatches in self._layers.values():
            rows = [(ids[: sizes[at]], weights[: sizes[at]]) for at, ids, weights in microbatches]
            if len(rows) == 1:
                yield LayerRouting(*rows[0])
            else:
                ids, weights = map(np.concatenate, zip(*rows, strict=True))
                yield LayerRouting(ids, weights)
