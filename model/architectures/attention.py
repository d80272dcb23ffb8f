"""What attention is to a program, and latent attention (MLA); `gqa` has the one with groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pykernels.cpu.attention.expanded import expand_from
from runtime.kv_cache.layout import CacheSpec
from runtime.program import Builder
from runtime.program.weight_spec import WeightSpec
from runtime.program.weights import WeightStore

from .families import Family, rope_kinds
from .linear import Linear
from .specs import Specs

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


@dataclass(frozen=True)
class Rope:
    """A kind of rotary embedding.

    Attributes:
        kind: of ``families.rope_kinds``.
        frequencies: float32 [R / 2]; ``scale``: of cos and sin (YaRN).
    """

    kind: str
    frequencies: WeightSpec
    scale: float


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


def ropes_of(module: Any, config: Any, store: WeightStore) -> tuple[Rope, ...]:
    """The rotary embeddings that a module of transformers' makes; their frequencies are in no
    checkpoint."""
    with torch.device("cpu"):  # whatever the default is
        rotary = type(module)(config)
    found = []
    for kind in rope_kinds(config):
        name, prefix = (f"rope.{kind}", f"{kind}_") if kind else ("rope", "")
        frequencies = getattr(rotary, f"{prefix}inv_freq").float()
        scale = float(getattr(rotary, f"{prefix}attention_scaling"))
        found.append(Rope(kind, store.add(f"{name}.frequencies", frequencies), scale))
    return tuple(found)


def angles_of(rope: str) -> str:
    """The buffer [T, 2, R / 2] of cos and sin of a kind of rotary embedding."""
    return f"angles.{rope}" if rope else "angles"


def eps_of(norm: Any) -> float:
    """What a norm of transformers' adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
