"""What a measurement runs on: random experts out of cache, and routings of a given skew."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pykernels.errors import PykernelsError
from pykernels.quant.layout import ceil_to
from pykernels.quant.split import Experts, repeat_first
from pykernels.shapes import MoEShape
from pykernels.target import detect

from ..devices.cpu.routed import CpuExperts
from ..machine.memory import HUGE_PAGE
from ..machine.topology import Topology
from ..workers.pool import WorkerPool

ROUTINGS = ("balanced", "zipf", "one")
"""How tokens spread over experts; the FLOPs are the same."""

CACHES = 4
"""Bytes read between two uses of the same weights: at least so many times the last-level cache."""

MOST_LAYERS = 8192
"""Layers at most: more would take minutes to fill, and each takes some of the 65,530 mappings that
the system allows a process (vm.max_map_count)."""

_COUNT = 64


def routings(shape: MoEShape, T: int, kind: str, count: int = _COUNT) -> list[torch.Tensor]:
    """int64 [T, topk] tensors, the same at every call; no token takes an expert twice.

    Each one maps ranks to experts differently, so that the busiest expert is not always the same
    and calls that follow one another read other weights where they can.

    Args:
        kind: "balanced": T * topk / E tokens for every expert, one more or less where that is no
            whole number; "zipf": a token draws topk experts, the one of rank r (from 0) with weight
            1 / (r + 1); "one": all tokens take the same topk experts.

    Raises:
        PykernelsError: no such kind.
    """
    if kind not in ROUTINGS:
        raise PykernelsError(f"there is no routing {kind!r}", f"Use one of {', '.join(ROUTINGS)}")
    g = torch.Generator().manual_seed(0)
    # Rank -> expert, shifted for every routing.
    order = torch.randperm(shape.E, generator=g, dtype=torch.int64, device="cpu")
    log_p = -torch.arange(1, shape.E + 1, dtype=torch.float32, device="cpu").log()
    slots = torch.arange(T * shape.topk, dtype=torch.int64, device="cpu").view(T, shape.topk)
    result = []
    for number in range(count):
        if kind == "balanced":
            ranks, shift = slots % shape.E, number * T * shape.topk
        elif kind == "one":
            ranks, shift = slots % shape.topk, number * shape.topk
        else:  # the topk largest of log p + Gumbel noise: draws without replacement
            noise = uniform(g, T, shape.E).clamp(1e-9, 1 - 1e-7)
            keys = log_p - (-noise.log()).log()
            ranks, shift = keys.argsort(-1, descending=True)[:, : shape.topk], number
        result.append(order[(ranks + shift) % shape.E].contiguous())
    return result


def check_calls(shape: MoEShape, T: int, count: int = _COUNT) -> None:
    """Raises PykernelsError if calls of T tokens, with ``count`` routings, do not fit in memory."""
    x_y_h = shape.H * (4 + 4 + 2) + shape.topk * shape.I * 4  # of one token, about
    one_token = count * shape.topk * 8 + x_y_h
    if (need := T * one_token) > (most := 0.9 * (free := Topology.detect().memory_available)):
        raise PykernelsError(
            f"calls of {T} token{'s' * (T > 1)} need {need / 2**30:.1f} GiB beside the weights,"
            f" {free / 2**30:.1f} GiB are free",
            "Take fewer tokens" if one_token <= most else "Take a narrower layer or a smaller topk",
        )


def check_layers(shape: MoEShape, fmt: str, count: int = 1) -> None:
    """Raises PykernelsError if ``count`` layers of random experts are more than ``MOST_LAYERS``, or
    do not fit in memory."""
    nbytes = CpuExperts.bytes_needed(shape, fmt)
    if count > MOST_LAYERS:
        raise PykernelsError(
            f"a layer of {nbytes / 2**10:.0f} KiB is too small to be timed out of cache: that"
            f" takes {count} layers in turn, {MOST_LAYERS} are the most",
            "Take more experts, or wider ones",
        )
    need = count * (ceil_to(nbytes, HUGE_PAGE) if nbytes >= HUGE_PAGE else nbytes)
    if need > 0.9 * (free := Topology.detect().memory_available):
        raise PykernelsError(
            f"{count} layer(s) of {shape.E} experts in {fmt} need {need / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are free",
            "Take fewer experts; the weights only have to be larger than the cache",
        )


def distinct(ids: torch.Tensor) -> int:
    """Experts that a call reads."""
    return int(ids.unique().numel())


def experts_between(calls: list[torch.Tensor]) -> int:
    """The fewest distinct experts that one layer reads from a use of an expert to its next use.

    Args:
        calls: the routings, used one after the other, again and again.
    """
    sets = [frozenset(ids.unique().tolist()) for ids in calls]
    fewest = len(frozenset().union(*sets))
    for start in range(len(sets)):
        waiting, read = sets[start], sets[start]
        for step in range(1, len(sets)):
            if len(read) >= fewest:
                break
            following = sets[(start + step) % len(sets)]
            if waiting & following:
                fewest = len(read)
                break
            read |= following
    return fewest


def layers_out_of_cache(l3: int, bytes_between: float) -> int:
    """Layers to use one after the other so that no weight is in cache when it is used again.

    Args:
        l3: bytes of the last-level cache.
        bytes_between: what one layer reads from a use of a weight to its next use.
    """
    return max(1, -int(-CACHES * l3 // bytes_between))


class RandomLayers:
    """Layers of random experts in one format, as many as it takes to be out of cache.

    Args:
        routings: of the calls to come; ``call_of`` says which goes with which layer.
        pool: the threads; None for the shared pool.
        progress: called with the share of the layers that are filled, 0 to 1.

    Raises:
        PykernelsError: not enough memory for the weights, or so small a layer that it takes more
            than ``MOST_LAYERS``.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: str,
        routings: list[torch.Tensor],
        pool: WorkerPool | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.shape, self.fmt, self._pool = shape, fmt, pool
        nbytes = CpuExperts.bytes_needed(shape, fmt)
        count = layers_out_of_cache(detect().l3, nbytes / shape.E * experts_between(routings))
        check_layers(shape, fmt, count)
        self.packed = [_fill(CpuExperts(shape, fmt, pool))]
        while len(self.packed) < count:
            if progress:
                progress(len(self.packed) / count)
            # The same bytes, in other memory: a cache goes by addresses.
            self.packed.append(_copy(self.packed[0], CpuExperts(shape, fmt, pool).weights))
        self.bytes_per_expert = self.packed[0].bytes_per_expert

    def experts(self, kernel: str, activations: str = "bf16") -> list[CpuExperts]:
        """The layers on one backend; every backend reads the same weights.

        Raises:
            PykernelsError: the backend cannot run this format here.
        """
        made = []
        for packed in self.packed:
            layer = CpuExperts(self.shape, self.fmt, self._pool, kernel, activations)
            layer.weights = packed  # its own pages were never touched and take no memory
            made.append(layer)
        return made


def call_of(number: int, layers: int, routings: int) -> tuple[int, int]:
    """(layer, routing) of a call: all layers with one routing, then all with the next."""
    return number % layers, number // layers % routings


def normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Float32 numbers from a standard normal distribution."""
    return torch.randn(shape, generator=g, dtype=torch.float32, device="cpu")


def uniform(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Float32 numbers from 0 to 1."""
    return torch.rand(shape, generator=g, dtype=torch.float32, device="cpu")


def _copy(filled: Experts, into: Experts) -> Experts:
    """Gives a layer's experts the bytes of another's."""
    for source, packed in zip(filled.slices, into.slices, strict=True):
        for section, filled_section in zip(packed.sections, source.sections, strict=True):
            section.copy_(filled_section)
        packed.packed = list(source.packed)
    return into


def _fill(layer: CpuExperts) -> Experts:
    """One random expert, quantized and packed; the others are copies of its bytes."""
    packed, H, I = layer.weights, layer.shape.H, layer.shape.I  # noqa: E741
    g = torch.Generator().manual_seed(0)
    sizes = ((I, H), (I, H), (H, I))
    quantized = (packed.fmt.quantize(normal(g, N, K) / K**0.5) for N, K in sizes)
    layer.load_expert(0, *quantized)
    repeat_first(packed)
    return packed
