"""Which experts the tokens of an output used, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_EXPERT = -1
"""Stands for no expert in a layer that takes fewer experts a token than others do."""


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """A layer that chooses experts.

    Attributes:
        layer: its number among the decoder's layers.
        experts: from which it chooses; ``topk`` of them for each token.
    """

    layer: int
    experts: int
    topk: int


class LayerRouting(NamedTuple):
    """What one layer's router chose in a step."""

    ids: NDArray[np.int64]
    """[>= T, topk]"""
    weights: NDArray[np.float32]
    """[>= T, topk], as the experts' outputs are multiplied by them."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts of N tokens one after the other, in L layers, K of a token.

    Attributes:
        first: position of the first of these tokens in the sequence.
        ids: int32 [N, L, K], experts; ``NO_EXPERT`` behind the last one of a layer.
        weights: float32 [N, L, K].
    """

    first: int
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


class RoutingLog:
    """Grows with one sequence. The engine's thread writes it, and any thread may read it.

    Tokens that are found in the prefix cache are not computed, so the log begins behind them. So it
    ends before the last drawn token, which nothing has computed.
    """

    def __init__(self, layers: Sequence[RoutedLayer]) -> None:
        self._shape = len(layers), max(layer.topk for layer in layers)
        self._first = 0
        self._rows: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []

    def write(self, position: int, begin: int, end: int, step: Iterable[LayerRouting]) -> None:
        """The tokens ``begin`` to ``end`` of a step are those from ``position`` on."""
        if not self._rows:
            self._first = position
        # A preempted request is computed again: of that, only what is new.
        begin += max(0, self._first + len(self._rows) - position)
        if begin >= end:
            return
        ids = np.full((end - begin, *self._shape), NO_EXPERT, np.int32)
        weights = np.zeros(ids.shape, np.float32)
        for at, layer in enumerate(step):
            topk = layer.ids.shape[1]
            ids[:, at, :topk] = layer.ids[begin:end]
            weights[:, at, :topk] = layer.weights[begin:end]
        self._rows += zip(ids, weights, strict=True)

    def extend(self, more: RoutedExperts) -> None:
        """The tokens behind those that are here, as another log has them."""
        if not self._rows:
            self._first = more.first
        self._rows += zip(more.ids, more.weights, strict=True)

    def since(self, count: int) -> RoutedExperts:
        """All but the first ``count`` tokens of the log."""
        rows = self._rows[count:]
        if not rows:
            empty = np.zeros((0, *self._shape))
            return RoutedExperts(
                self._first + count, empty.astype(np.int32), empty.astype(np.float32)
            )
        ids, weights = zip(*rows, strict=True)
        return RoutedExperts(self._first + count, np.stack(ids), np.stack(weights))
