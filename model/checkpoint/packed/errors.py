"""How far converted weights are from those that were stored: a relative error for each kind."""

from __future__ import annotations

import math
import threading

import torch

_KINDS = {
    "experts": {"experts"},
    "attention": {"self_attn", "linear_attn", "conv"},
    "mlp": {"mlp", "feed_forward"},
}
"""By what a matrix is counted as: parts of its name. The others are the head's."""


class Errors:
    """Sums of squares of a layer's weights and of what conversion changed, by kind of matrix."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()  # experts are converted on several threads

    def add(self, name: str, stored: torch.Tensor, converted: torch.Tensor) -> None:
        """Counts one matrix, float32 both, by the name of its parameter ("experts" of experts)."""
        parts = {*name.split(".")}
        kind = next((kind for kind, leaves in _KINDS.items() if leaves & parts), "head")
        change, norm = (converted - stored).norm().item(), stored.norm().item()
        with self._lock:
            before = self._sums.get(kind, (0.0, 0.0))
            self._sums[kind] = before[0] + change**2, before[1] + norm**2

    def take(self) -> dict[str, float]:
        """``|converted - stored| / |stored|`` (Frobenius) of each kind; begins again."""
        errors = {kind: math.sqrt(a / b) if b else 0.0 for kind, (a, b) in self._sums.items()}
        self._sums = {}
        return errors
