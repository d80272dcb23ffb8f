"""A short convolution between two gates in the place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.kv_cache.layout import CachePart, CacheSpec
from runtime.program import Builder
from runtime.program.weight_spec import WeightSpec

from .delta_net import BY_SEQUENCE
from .families import Family
from .linear import Linear
from .specs import Specs


@dataclass(frozen=True)
class ShortConv:
    """The layer of LFM2 ("LFM2 Technical Report", arXiv 2511.23404): of three projections B, C and
    x of a token it convolves B x over some tokens, and C is the factor of the sum.

    Attributes:
        first: B, C and x, one behind the other; ``o``: of the result.
        conv: [K, H]; ``bias``: [H].
    """

    first: Linear
    conv: WeightSpec
    bias: WeightSpec | None
    o: Linear
    head = None

    @classmethod
    def make(cls, module: Any, name: str, specs: Specs, family: Family) -> ShortConv:
        """From a module with ``in_proj``, ``conv`` and ``out_proj``."""
        return cls(
            first=specs.linear(f"{name}.in_proj"),
            conv=specs.vector(f"{name}.conv.weight", "by places"),
            bias=specs.tensor(f"{name}.conv.bias"),
            o=specs.linear(f"{name}.out_proj"),
        )

    @staticmethod
    def cached(module: Any, kv_dtype: str) -> CacheSpec:
        """What such a module keeps of a sequence."""
        H, _, K = module.conv.weight.shape
        return _cache(K, H)

    def cache(self, kv_dtype: str) -> CacheSpec:
        return _cache(*self.conv.shape)

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        H = self.conv.shape[1]
        first = self.first.lower(b, f"{layer}.in_proj", x, f"{layer}.projected")
        out = b.buffer(f"{layer}.convolved", "T", H)
        b.node(
            "causal_conv1d",
            f"{layer}.conv",
            {
                **{"x": first, "in_gate": first, "out_gate": first},
                "conv": cache["conv"],
                **BY_SEQUENCE,
            },
            {"out": out, "conv": cache["conv"]},
            {"weight": self.conv, "bias": self.bias},
            silu=0,
            in_gate_start=0,
            out_gate_start=H,
            x_start=2 * H,
        )
        return self.o.lower(b, f"{layer}.o", out, f"{layer}.attended")


def _cache(K: int, H: int) -> CacheSpec:
    """The last inputs of the convolution."""
    return CacheSpec(state={"conv": CachePart((K - 1, H))})
