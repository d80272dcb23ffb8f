"""Our experts as one more taker of turns."""

from __future__ import annotations

import time

import torch

from pykernels.errors import PykernelsError
from pykernels.quant.split import Experts, repeat_first
from pykernels.shapes import MoEShape
from pykernels.target import detect
from runtime.experts import RoutedExperts
from runtime.topology import Topology

from .cases import layers_out_of_cache


class OurWeights:
    """Layers of random experts in one format, shared by every backend that is timed on them."""

    def __init__(self, fmt: str, shape: MoEShape) -> None:
        """Raises PykernelsError where memory is short."""
        self.fmt, self.shape = fmt, shape
        nbytes = RoutedExperts.bytes_needed(shape, fmt)
        count = layers_out_of_cache(detect().l3, nbytes)
        free = Topology.detect().memory_available
        if count * nbytes > 0.9 * free:
            raise PykernelsError(
                f"{count * nbytes / 2**30:.1f} GiB of {fmt} experts, {free / 2**30:.1f} are free",
                "Free some memory",
            )
        self.packed = [self._fill(RoutedExperts(shape, fmt)) for _ in range(count)]
        self.bytes_per_expert = self.packed[0].bytes_per_expert

    def _fill(self, layer: RoutedExperts) -> Experts:
        """One random expert, quantized and packed; the others are copies of its bytes."""
        packed, H, I = layer.weights, self.shape.H, self.shape.I  # noqa: E741
        g = torch.Generator().manual_seed(0)
        sizes = ((I, H), (I, H), (H, I))
        quantized = (packed.fmt.quantize(torch.randn(s, generator=g) / s[1] ** 0.5) for s in sizes)
        layer.load_expert(0, *quantized)
        repeat_first(packed)
        return packed


class Ours:
    """One backend on ``OurWeights``, on the shared pool of the moment.

    Raises:
        PykernelsError: the backend cannot run this format here.
    """

    def __init__(self, weights: OurWeights, kernel: str) -> None:
        self.kernel = kernel
        self.layers = []
        for packed in weights.packed:
            layer = RoutedExperts(weights.shape, weights.fmt, kernel=kernel)
            layer.weights = packed  # its own were never touched: no memory
            self.layers.append(layer)
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
        i, self._next = self._next, self._next + 1
        experts, routing = self.layers[i % len(self.layers)], i % len(self.ids)
        start = time.perf_counter()
        experts(self.x, self.ids[routing], self.weights)
        return routing, time.perf_counter() - start
