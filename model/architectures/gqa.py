"""Attention with grouped queries as nodes of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.kv_cache.layout import CacheSpec
from runtime.program import Builder
from runtime.program.step_inputs import WINDOW_SLOTS, WINDOW_TABLE
from runtime.program.weight_spec import WeightSpec

from .attention import RAGGED, angles_of, eps_of
from .families import ONE_ROPE, Family, rope_kinds
from .linear import Linear
from .specs import Spans, Specs


@dataclass(frozen=True)
class GQA:
    """Attention with grouped queries; norms of queries and keys (of a head, or of all heads
    together), biases, sinks, a window and gates of heads where a family has them.

    Where it is ``gated``, the gates lie behind the queries, before keys and values. Values may be
    what keys are before their norm (Gemma 4's full layers).

    Attributes:
        rope: the kind of its rotary embedding, of ``families.rope_kinds``.
    """

    qkv: Linear
    q_norm: WeightSpec | None
    k_norm: WeightSpec | None
    eps: float
    o: Linear
    NH: int
    KVH: int
    D: int
    scale: float
    interleaved: bool
    window: int
    sinks: WeightSpec | None
    gated: bool = False
    v_norm: bool = False
    rope: str = ""

    @classmethod
    def make(cls, module: Any, name: str, specs: Specs, family: Family) -> GQA:
        """From an attention module with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``."""
        D, names = module.head_dim, family.names
        norm = getattr(module, names.q_norm, None)
        leaves = (names.q_norm, names.k_norm) if norm is not None else ()
        norms = [specs.vector(f"{name}.{leaf}.weight", family.norm_change) for leaf in leaves]
        NH = module.q_proj.out_features // D // (2 if family.gated else 1)
        own = [part for part in "qkv" if getattr(module, f"{part}_proj") is not None]
        parts, kinds = [f"{name}.{part}_proj" for part in own], rope_kinds(module.config)
        return cls(
            qkv=_with_gates(name, specs, NH, D) if family.gated else specs.linear(*parts),
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            eps=eps_of(norm) if norm is not None else 0.0,
            o=specs.linear(f"{name}.{names.o}"),
            NH=NH,
            KVH=module.k_proj.out_features // D,
            D=D,
            scale=module.scaling,
            interleaved=getattr(module.config, "rope_interleave", family.interleaved),
            window=family.window(module.config, module.layer_idx),
            sinks=specs.tensor(f"{name}.sinks"),
            gated=family.gated,
            v_norm=hasattr(module, "v_norm"),
            rope="" if kinds == ONE_ROPE else module.config.layer_types[module.layer_idx],
        )

    @staticmethod
    def cached(module: Any, kv_dtype: str) -> CacheSpec:
        """What such a module keeps of a sequence."""
        D = module.head_dim
        return CacheSpec.grouped(kv_dtype, module.k_proj.out_features // D, D)

    @property
    def head(self) -> tuple[int, int]:
        return self.D, self.D

    def cache(self, kv_dtype: str) -> CacheSpec:
        return replace(CacheSpec.grouped(kv_dtype, self.KVH, self.D), window=self.window)

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        windowed = bool(self.window) and b.has(WINDOW_TABLE)  # it has pages of its own
        slots = WINDOW_SLOTS if windowed else "slot_mapping"
        sequences = {**RAGGED, "page_table": WINDOW_TABLE} if windowed else RAGGED
        qkv = self.qkv.lower(b, f"{layer}.qkv", x, f"{layer}.qkv")
        q = b.buffer(f"{layer}.rotated", "T", self.NH, self.D)
        starts = self.qkv.starts  # each at a 32-row block, so there may be gaps
        k_start, v_start = (starts[1], starts[1]) if len(starts) == 2 else starts[-2:]
        b.node(
            "gqa_rope_cache_write",
            f"{layer}.write",
            {"qkv": qkv, "angles": angles_of(self.rope), "slot_mapping": slots, **cache},
            {"rotated": q, **cache},
            {"q_norm": self.q_norm, "k_norm": self.k_norm},
            heads=self.NH,
            eps=self.eps,
            interleaved=int(self.interleaved),
            k_start=k_start,
            v_start=v_start,
            v_norm=int(self.v_norm),
        )
        out = b.buffer(f"{layer}.attn_out", "T", self.NH * self.D)
        b.node(
            "attention",
            f"{layer}.attention",
            {"q": q, **cache, **sequences},
            {"out": out},
            {"sinks": self.sinks},
            heads=self.NH,
            kv_heads=self.KVH,
            dk=self.D,
            dv=self.D,
            scale=self.scale,
            window=self.window,
        )
        if self.gated:
            inputs, gated = (
                {"x": out, "gate": qkv},
                b.buffer(f"{layer}.gated", "T", self.NH * self.D),
            )
            b.node(
                "sigmoid_mul",
                f"{layer}.gates",
                inputs,
                {"out": gated},
                heads=self.NH,
                D=self.D,
                gate_start=self.qkv.starts[1],
            )
            out = gated
        return self.o.lower(b, f"{layer}.o", out, f"{layer}.attended")


def _with_gates(name: str, specs: Specs, NH: int, D: int) -> Linear:
    """Queries, gates, keys and values, where each head's queries and gate are neighbours."""

    def half(which: int) -> Spans:
        return [((2 * h + which) * D, (2 * h + which + 1) * D) for h in range(NH)]

    q = f"{name}.q_proj"
    parts = ("q", q, half(0)), ("gate", q, half(1))
    return specs.some_rows(name, *parts, ("k", f"{name}.k_proj", ()), ("v", f"{name}.v_proj", ()))
