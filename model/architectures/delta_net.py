"""A gated delta net in the place of attention: a convolution, and a memory of one matrix a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.kv_cache.layout import CachePart, CacheSpec
from runtime.program import Builder
from runtime.program.weight_spec import WeightSpec

from .families import Family
from .linear import Linear
from .specs import Spans, Specs

BY_SEQUENCE = {name: name for name in ("query_starts", "query_lengths", "state_slots", "has_state")}
"""Which tokens are of which sequence and where its state is, as inputs of ops."""

_Taken = tuple[str, str, Spans]
"""Label, module and rows of a part, see ``Specs.some_rows``."""


@dataclass(frozen=True)
class GatedDeltaNet:
    """The layer of Qwen3-Next ("Gated Delta Networks", arXiv 2412.06464).

    ``first`` has, one behind the other, the queries, keys and values of all heads, the values'
    gates (z), and a number each for how much is written (b) and for how much is kept (a).

    Attributes:
        conv: [K, C], over queries, keys and values.
        rate: [HV] of the decay; ``norm``: [DV], of each head's result, before its gate.
        tiled: whether value heads go over the key heads in turns, as in GGUF files of Qwen3.5.
    """

    first: Linear
    conv: WeightSpec
    rate: WeightSpec
    dt_bias: WeightSpec
    norm: WeightSpec
    eps: float
    o: Linear
    HK: int
    HV: int
    DK: int
    DV: int
    tiled: bool
    head = None

    @classmethod
    def make(cls, module: Any, name: str, specs: Specs, family: Family) -> GatedDeltaNet:
        """From a ``linear_attn`` with a linear for each part, ``in_proj_qkv`` and so on, or with
        ``in_proj_qkvz`` and ``in_proj_ba``, see ``_wide`` and ``_narrow``; GGUF files of the second
        kind may have ``in_proj_qkv`` and ``in_proj_z`` too."""
        HK, HV, DK, DV = _sizes(module)
        group = HV // HK
        wide, narrow = f"{name}.in_proj_qkvz", f"{name}.in_proj_ba"
        qkvz, ba = _own(name, "qkv", "z"), _own(name, "b", "a")
        if specs.has(f"{wide}.weight"):
            qkvz = _wide(wide, HK, group, DK, DV)
        if specs.has(f"{narrow}.weight"):
            ba = _narrow(narrow, HK, group)
        return cls(
            first=specs.some_rows(name, *qkvz, *ba),
            conv=specs.vector(f"{name}.conv1d.weight", "by places"),
            rate=specs.vector(f"{name}.A_log", "minus exp"),
            dt_bias=specs.vector(f"{name}.dt_bias"),
            norm=specs.vector(f"{name}.norm.weight"),
            eps=module.layer_norm_epsilon,
            o=specs.linear(f"{name}.out_proj"),
            HK=HK,
            HV=HV,
            DK=DK,
            DV=DV,
            tiled=family.tiled,
        )

    @staticmethod
    def cached(module: Any, kv_dtype: str) -> CacheSpec:
        """What such a module keeps of a sequence."""
        return _cache(*_sizes(module), module.conv_kernel_size)

    def cache(self, kv_dtype: str) -> CacheSpec:
        return _cache(self.HK, self.HV, self.DK, self.DV, self.conv.shape[0])

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        C = self.conv.shape[1]
        first = self.first.lower(b, f"{layer}.in_proj", x, f"{layer}.projected")
        _, z_start, b_start, a_start = self.first.starts  # the convolution's inputs begin at 0
        qkv = b.buffer(f"{layer}.convolved", "T", C)
        b.node(
            "causal_conv1d",
            f"{layer}.conv",
            {"x": first, "conv": cache["conv"], **BY_SEQUENCE},
            {"out": qkv, "conv": cache["conv"]},
            {"weight": self.conv},
        )
        gates = {name: b.buffer(f"{layer}.{name}", "T", self.HV) for name in ("g", "beta")}
        b.node(
            "delta_gates",
            f"{layer}.delta_gates",
            {"a": first, "b": first},
            gates,
            {"rate": self.rate, "dt_bias": self.dt_bias},
            a_start=a_start,
            b_start=b_start,
        )
        out = b.buffer(f"{layer}.remembered", "T", self.HV * self.DV)
        b.node(
            "gated_delta_rule",
            f"{layer}.delta_rule",
            {"qkv": qkv, **gates, "delta": cache["delta"], **BY_SEQUENCE},
            {"out": out, "delta": cache["delta"]},
            HK=self.HK,
            scale=self.DK**-0.5,
            eps=1e-6,
            tiled=int(self.tiled),
        )
        gated = b.buffer(f"{layer}.gated", "T", self.HV * self.DV)
        b.node(
            "gated_rms_norm",
            f"{layer}.gated_norm",
            {"x": out, "gate": first},
            {"out": gated},
            {"weight": self.norm},
            heads=self.HV,
            gate_start=z_start,
            eps=self.eps,
        )
        return self.o.lower(b, f"{layer}.o", gated, f"{layer}.attended")


def _sizes(module: Any) -> tuple[int, int, int, int]:
    """Key and value heads of a module, and their sizes."""
    return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim


def _cache(HK: int, HV: int, DK: int, DV: int, K: int) -> CacheSpec:
    """The last inputs of the convolution, and the heads' matrices."""
    conv = CachePart((K - 1, 2 * HK * DK + HV * DV))
    return CacheSpec(state={"conv": conv, "delta": CachePart((HV, DK, DV))})


def _own(name: str, *parts: str) -> list[_Taken]:
    """Parts that have a linear each."""
    return [(part, f"{name}.in_proj_{part}", ()) for part in parts]


def _wide(name: str, HK: int, group: int, DK: int, DV: int) -> list[_Taken]:
    """The parts of ``in_proj_qkvz``, whose rows go by key heads: what each has of queries, of keys,
    and of the values and the gates of its group."""
    starts = [0, DK, 2 * DK, 2 * DK + group * DV, 2 * DK + 2 * group * DV]
    q, k, v, z = (_by_heads(HK, starts, part) for part in range(4))
    return [("qkv", name, [*q, *k, *v]), ("z", name, z)]


def _narrow(name: str, HK: int, group: int) -> list[_Taken]:
    """The parts of ``in_proj_ba``, whose rows go by key heads, too."""
    b, a = (_by_heads(HK, [0, group, 2 * group], part) for part in range(2))
    return [("b", name, b), ("a", name, a)]


def _by_heads(heads: int, starts: list[int], part: int) -> list[tuple[int, int]]:
    """Rows of one part of each head: those from its start to that of the next one."""
    return [
        (head * starts[-1] + starts[part], head * starts[-1] + starts[part + 1])
        for head in range(heads)
    ]
