"""What the writer of a file asks of a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Shapes = dict[str, tuple[int, ...]]
"""Shapes by llama.cpp's names of tensors, outermost dimension first."""


def ones(config: Any, name: str, shape: tuple[int, ...]) -> Any:
    """float32 ones: what most vectors are."""
    return np.ones(shape, np.float32)


@dataclass(frozen=True)
class Family:
    """Models that have the same tensors, by their configurations.

    Attributes:
        architecture: llama.cpp's name of it.
        layer: the tensors of a configuration's layer, by their names after the layer's.
        add_metadata: writes what a file says of the family besides the sizes that all have.
        rest: the tensors that are in no layer, but for the embedding and the head.
        vector: float32 [N], the numbers of a vector of that name and shape.
    """

    architecture: str
    layer: Callable[[Any, int], Shapes]
    add_metadata: Callable[[Any, Any], None]
    rest: Callable[[Any], Shapes] = lambda config: {"output_norm.weight": (config.hidden_size,)}
    vector: Callable[[Any, str, tuple[int, ...]], Any] = ones


def experts(E: int, I: int, H: int) -> Shapes:  # noqa: E741
    """The routed experts of a layer, a tensor for each projection."""
    return {
        "ffn_gate_exps.weight": (E, I, H),
        "ffn_up_exps.weight": (E, I, H),
        "ffn_down_exps.weight": (E, H, I),
    }
