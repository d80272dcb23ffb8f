"""Our experts as one more taker of turns."""

from __future__ import annotations

import time

import torch

from runtime.profiling.workload import RandomLayers, call_of


def split_name(name: str) -> tuple[str, str]:
    """ "avx512/int8" -> (backend, activations); bf16 is not written."""
    backend, _, activations = name.partition("/")
    return backend, activations or "bf16"


class Ours:
    """One backend on random layers, on the shared pool of the moment.

    Args:
        kernel: "avx512", or with other activations "avx512/int8".

    Raises:
        PykernelsError: the backend cannot run this format here.
    """

    def __init__(self, weights: RandomLayers, kernel: str) -> None:
        self.kernel, self.layers = kernel, weights.experts(*split_name(kernel))
        self._next = 0

    def prepare(self, T: int, ids: list[torch.Tensor]) -> None:
        """Takes the routings of the turns to come; the first call also compiles."""
        g = torch.Generator().manual_seed(1)
        shape = self.layers[0].shape
        self.x = torch.randn(T, shape.H, generator=g).to(torch.bfloat16)
        self.weights = torch.rand(T, shape.topk, generator=g)
        self.ids, self._next = ids, 0
        self._call()

    def turn(self, seconds: float, most: int = 1000) -> list[tuple[int, float]]:
        """About ``seconds`` of calls, at least one: (routing, seconds) of each."""
        calls: list[tuple[int, float]] = []
        end = time.perf_counter() + seconds
        while not calls or (time.perf_counter() < end and len(calls) < most):
            calls.append(self._call())
        return calls

    def _call(self) -> tuple[int, float]:
        layer, routing = call_of(self._next, len(self.layers), len(self.ids))
        self._next += 1
        start = time.perf_counter()
        self.run(layer, routing)
        return routing, time.perf_counter() - start

    def run(self, layer: int, routing: int) -> torch.Tensor:
        """One call; its [T, H] result."""
        return self.layers[layer](self.x, self.ids[routing], self.weights)
