"""Attention of each family as nodes of a program: latent (MLA), or with grouped queries (GQA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pykernels.cpu.attention.expanded import expand_from
from runtime.kv_cache.layout import CacheSpec
from runtime.program import Builder
from runtime.program.weight_spec import WeightSpec

from .families import Family
from .linear import Linear
from .specs import Spans, Specs

RAGGED = {
    name: name
    for name in (
        "positions",
        "sequences",
        "page_table",
        "query_starts",
        "query_lengths",
        "lengths",
        "page_rows",
    )
}
"""Which tokens are of which sequence and where its pages are, as inputs of attention."""


class Attention(Protocol):
    """What a layer's attention, or what is in its place, is to the program."""

    @property
    def head(self) -> tuple[int, int] | None:
        """Numbers of a key and of a value of a head; None: it attends to no keys."""

    def cache(self, kv_dtype: str) -> CacheSpec:
        """What it keeps of a sequence, with keys and values in that dtype."""

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        """Adds its nodes; returns the buffer [T, H] of what it adds to the residual stream.

        Args:
            cache: the buffers of what it keeps, by the names of the parts.
        """


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention with ``W_UK`` and ``W_UV`` absorbed (DeepSeek-V2, 2.1.2); for
    sequences of many tokens in a step, keys and values are expanded instead.

    ``kv_start`` is where the latent begins in the output of ``first``, whose first part are the
    queries' latents, or the queries themselves where there is no ``q_b``.
    """

    first: Linear
    q_norm: WeightSpec | None
    q_b: Linear | None
    kv_norm: WeightSpec
    q_eps: float
    kv_eps: float
    uk: WeightSpec
    uv: WeightSpec
    o: Linear
    NH: int
    nope: int
    R: int
    L: int
    dv: int
    scale: float
    interleaved: bool

    @classmethod
    def make(cls, module: Any, name: str, specs: Specs, family: Family) -> MLA:
        """From an attention module with ``kv_a_proj_with_mqa`` and ``kv_b_proj``."""
        first = "q_a_proj" if module.q_lora_rank is not None else "q_proj"
        NH, nope, dv = module.num_heads, module.qk_nope_head_dim, module.v_head_dim
        both, kv_b = nope + dv, f"{name}.kv_b_proj.weight"
        deep = module.q_lora_rank is not None
        L = module.kv_lora_rank
        uk = specs.stack(f"{name}.k_b_proj.weight", (NH, L, nope))
        uv = specs.stack(f"{name}.v_b_proj.weight", (NH, dv, L))
        if uk is None or uv is None:
            keys = [slice(h * both, h * both + nope) for h in range(NH)]
            values = [slice(h * both + nope, (h + 1) * both) for h in range(NH)]
            uk = specs.heads(f"{name}.uk", kv_b, keys, True)
            uv = specs.heads(f"{name}.uv", kv_b, values)
        return cls(
            first=specs.linear(f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"),
            q_norm=specs.vector(f"{name}.q_a_layernorm.weight") if deep else None,
            q_b=specs.linear(f"{name}.q_b_proj") if deep else None,
            kv_norm=specs.vector(f"{name}.kv_a_layernorm.weight"),
            q_eps=eps_of(module.q_a_layernorm) if deep else 0.0,
            kv_eps=eps_of(module.kv_a_layernorm),
            uk=uk,
            uv=uv,
            o=specs.linear(f"{name}.o_proj"),
            NH=NH,
            nope=nope,
            R=module.qk_rope_head_dim,
            L=L,
            dv=dv,
            scale=module.scaling,
            interleaved=getattr(module.config, "rope_interleave", family.interleaved),
        )

    @staticmethod
    def cached(module: Any, kv_dtype: str) -> CacheSpec:
        """What such a module keeps of a sequence."""
        return CacheSpec.latent(kv_dtype, module.kv_lora_rank, module.qk_rope_head_dim)

    @property
    def head(self) -> tuple[int, int]:
        return self.L + self.R, self.L

    @property
    def expansion(self) -> tuple[int, int, int, int]:
        """What ``expand_from`` takes."""
        return self.L, self.R, self.nope, self.dv

    def cache(self, kv_dtype: str) -> CacheSpec:
        return CacheSpec.latent(kv_dtype, self.L, self.R)

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        width, D = self.L + self.R, self.nope + self.R
        q = a = self.first.lower(b, f"{layer}.q_kv_a", x, f"{layer}.a")
        if self.q_b is not None:
            assert self.q_norm is not None
            normed = b.buffer(f"{layer}.q_a", "T", *self.q_norm.shape)
            b.node(
                "rms_norm",
                f"{layer}.q_norm",
                {"x": a},
                {"out": normed},
                {"weight": self.q_norm},
                eps=self.q_eps,
            )
            q = self.q_b.lower(b, f"{layer}.q_b", normed, f"{layer}.q")
        rotated = b.buffer(f"{layer}.rotated", "T", self.NH, width)
        many = expand_from(*self.expansion)
        expanded: dict[str, Any] = {"expand_from": many} if many <= b.size("T") else {}
        sequences = {"sequences": "sequences"} if expanded else {}
        b.node(
            "mla_rope_cache_write",
            f"{layer}.write",
            {"q": q, "kv": a, "angles": "angles", "slot_mapping": "slot_mapping", **cache},
            {"rotated": rotated, **cache},
            {"kv_norm": self.kv_norm},
            nope=self.nope,
            heads=self.NH,
            eps=self.kv_eps,
            interleaved=int(self.interleaved),
            kv_start=self.first.starts[1],
        )
        b.node(
            "per_head_linear",
            f"{layer}.uk",
            {"x": q, "out": rotated, **sequences},
            {"out": rotated},
            {"heads": self.uk},
            x_head=D,
            out_head=width,
            **expanded,
        )
        latent = b.buffer(f"{layer}.attn_latent", "T", self.NH, self.L)
        attrs: dict[str, Any] = {"heads": self.NH, "scale": self.scale, **expanded}
        b.node(
            "attention",
            f"{layer}.attention",
            {"q": rotated, **cache, **RAGGED},
            {"out": latent},
            kv_heads=1,
            dk=width,
            dv=self.L,
            **attrs,
        )
        out = b.buffer(f"{layer}.attn_out", "T", self.NH * self.dv)
        b.node(
            "per_head_linear",
            f"{layer}.uv",
            {"x": latent, **sequences},
            {"out": out},
            {"heads": self.uv},
            x_head=self.L,
            out_head=self.dv,
            **expanded,
        )
        if expanded:
            b.node(
                "attention_expanded",
                f"{layer}.expanded",
                {"q": rotated, "q_nope": q, "out": out, **cache, **RAGGED},
                {"out": out},
                {"uk": self.uk, "uv": self.uv},
                nope=self.nope,
                dv=self.dv,
                **attrs,
            )
        return self.o.lower(b, f"{layer}.o", out, f"{layer}.attended")


@dataclass(frozen=True)
class GQA:
    """Attention with grouped queries; norms of queries and keys (of a head, or of all heads
    together), biases, sinks, a window and gates of heads where a family has them.

    Where it is ``gated``, the gates lie behind the queries, before keys and values.
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

    @classmethod
    def make(cls, module: Any, name: str, specs: Specs, family: Family) -> GQA:
        """From an attention module with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``."""
        D, norm = module.head_dim, getattr(module, "q_norm", None)
        NH = module.q_proj.out_features // D // (2 if family.gated else 1)
        parts, change = [f"{name}.{part}_proj" for part in "qkv"], family.norm_change
        return cls(
            qkv=_with_gates(name, specs, NH, D) if family.gated else specs.linear(*parts),
            q_norm=specs.vector(f"{name}.q_norm.weight", change) if norm is not None else None,
            k_norm=specs.vector(f"{name}.k_norm.weight", change) if norm is not None else None,
            eps=eps_of(norm) if norm is not None else 0.0,
            o=specs.linear(f"{name}.o_proj"),
            NH=NH,
            KVH=module.k_proj.out_features // D,
            D=D,
            scale=module.scaling,
            interleaved=getattr(module.config, "rope_interleave", family.interleaved),
            window=family.window(module.config, module.layer_idx),
            sinks=specs.tensor(f"{name}.sinks"),
            gated=family.gated,
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
        return CacheSpec.grouped(kv_dtype, self.KVH, self.D)

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        qkv = self.qkv.lower(b, f"{layer}.qkv", x, f"{layer}.qkv")
        q = b.buffer(f"{layer}.rotated", "T", self.NH, self.D)
        *_, k_start, v_start = self.qkv.starts  # each at a 32-row block, so there may be gaps
        b.node(
            "gqa_rope_cache_write",
            f"{layer}.write",
            {"qkv": qkv, "angles": "angles", "slot_mapping": "slot_mapping", **cache},
            {"rotated": q, **cache},
            {"q_norm": self.q_norm, "k_norm": self.k_norm},
            heads=self.NH,
            eps=self.eps,
            interleaved=int(self.interleaved),
            k_start=k_start,
            v_start=v_start,
        )
        out = b.buffer(f"{layer}.attn_out", "T", self.NH * self.D)
        b.node(
            "attention",
            f"{layer}.attention",
            {"q": q, **cache, **RAGGED},
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


def eps_of(norm: Any) -> float:
    """What a norm of transformers' adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
