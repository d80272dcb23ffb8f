"""Attention of each family as nodes of a program: latent (MLA), or with grouped queries (GQA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pykernels.cpu.attention.expanded import expand_from
from runtime.kv_cache.layout import Pages, Part
from runtime.matrix import PackedHeads, PackedMatrix
from runtime.program import Builder

from .weights import Packing


class Attention(Protocol):
    """What a layer's attention is to the program."""

    def caches(self, pages: Pages) -> dict[str, Part]:
        """Its parts of the cache, by their endings."""

    def lower(self, b: Builder, layer: str, x: str, pages: Pages) -> str:
        """Adds its nodes; returns the buffer [T, H] of what it adds to the residual stream."""


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention with ``W_UK`` and ``W_UV`` absorbed (DeepSeek-V2, 2.1.2); for
    sequences of many tokens in a step, keys and values are expanded instead.

    ``kv_start`` is where the latent begins in the output of ``first``, whose first part are the
    queries' latents, or the queries themselves where there is no ``q_b``.
    """

    first: PackedMatrix
    first_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    q_b: PackedMatrix | None
    kv_norm: torch.Tensor
    q_eps: float
    kv_eps: float
    uk: PackedHeads
    uv: PackedHeads
    o: PackedMatrix
    o_bias: torch.Tensor | None
    NH: int
    nope: int
    R: int
    L: int
    dv: int
    scale: float
    interleaved: bool

    @classmethod
    def make(cls, module: Any, name: str, packing: Packing) -> MLA:
        """From a DeepSeek attention module of that name."""
        first = "q_a_proj" if module.q_lora_rank is not None else "q_proj"
        names = [f"{name}.{part}" for part in (first, "kv_a_proj_with_mqa")]
        matrix = packing.matrix(*(f"{part}.weight" for part in names))
        NH, nope, dv = module.num_heads, module.qk_nope_head_dim, module.v_head_dim
        both, kv_b = nope + dv, f"{name}.kv_b_proj.weight"
        deep = module.q_lora_rank is not None
        o = packing.matrix(f"{name}.o_proj.weight")
        return cls(
            first=matrix,
            first_bias=packing.bias(matrix, *(f"{part}.bias" for part in names)),
            q_norm=packing.vector(f"{name}.q_a_layernorm.weight") if deep else None,
            q_b=packing.matrix(f"{name}.q_b_proj.weight") if deep else None,
            kv_norm=packing.vector(f"{name}.kv_a_layernorm.weight"),
            q_eps=module.q_a_layernorm.variance_epsilon if deep else 0.0,
            kv_eps=module.kv_a_layernorm.variance_epsilon,
            uk=packing.heads(kv_b, [slice(h * both, h * both + nope) for h in range(NH)], True),
            uv=packing.heads(kv_b, [slice(h * both + nope, (h + 1) * both) for h in range(NH)]),
            o=o,
            o_bias=packing.bias(o, f"{name}.o_proj.bias"),
            NH=NH,
            nope=nope,
            R=module.qk_rope_head_dim,
            L=module.kv_lora_rank,
            dv=dv,
            scale=module.scaling,
            interleaved=getattr(module.config, "rope_interleave", True),
        )

    @staticmethod
    def cached(module: Any, pages: Pages) -> dict[str, Part]:
        """The parts of such a module's cache."""
        return pages.latent(module.kv_lora_rank, module.qk_rope_head_dim)

    @staticmethod
    def head(module: Any) -> tuple[int, int]:
        """Numbers of a key and of a value, as attention sees them."""
        return module.kv_lora_rank + module.qk_rope_head_dim, module.kv_lora_rank

    def caches(self, pages: Pages) -> dict[str, Part]:
        return pages.latent(self.L, self.R)

    def lower(self, b: Builder, layer: str, x: str, pages: Pages) -> str:
        width, D = self.L + self.R, self.nope + self.R
        a = b.buffer(f"{layer}.a", "T", self.first.N)
        b.node("linear", f"{layer}.q_kv_a", [x], [a], _weights(self.first, self.first_bias))
        q = a
        if self.q_b is not None:
            assert self.q_norm is not None
            normed = b.buffer(f"{layer}.q_a", "T", len(self.q_norm))
            b.node(
                "rms_norm", f"{layer}.q_norm", [a], [normed], {"weight": self.q_norm},
                eps=self.q_eps,
            )  # fmt: skip
            q = b.buffer(f"{layer}.q", "T", self.q_b.N)
            b.node("linear", f"{layer}.q_b", [normed], [q], {"weight": self.q_b})
        cache = _buffers(b, layer, self.caches(pages))
        latents, *rest = cache.values()
        turned = b.buffer(f"{layer}.q_turned", "T", self.NH, width)
        many = expand_from(self.L, self.R, self.nope, self.dv)
        expanded: dict[str, Any] = {"expand_from": many} if many <= b.size("T") else {}
        sequences = ["sequences"] if expanded else []
        b.node(
            "mla_write", f"{layer}.write", [q, a, "rope", "slots"], [turned, *cache.values()],
            {"weight": self.kv_norm}, nope=self.nope, heads=self.NH, eps=self.kv_eps,
            interleaved=int(self.interleaved), kv_start=self.first.starts[1],
        )  # fmt: skip
        b.node(
            "heads", f"{layer}.uk", [q, turned, *sequences], [turned], {"heads": self.uk}, x_head=D,
            out_head=width, **expanded,
        )  # fmt: skip
        latent = b.buffer(f"{layer}.o_latent", "T", self.NH, self.L)
        read = [turned, latents, "positions", "sequences", "page_table", *rest]
        attrs: dict[str, Any] = {
            "heads": self.NH, "scale": self.scale, "parts": tuple(cache), **expanded,
        }  # fmt: skip
        b.node(
            "attention", f"{layer}.attention", read, [latent], kv_heads=1, dk=width, dv=self.L,
            **attrs,
        )  # fmt: skip
        values = b.buffer(f"{layer}.values", "T", self.NH * self.dv)
        b.node(
            "heads", f"{layer}.uv", [latent, *sequences], [values], {"heads": self.uv},
            x_head=self.L, out_head=self.dv, **expanded,
        )  # fmt: skip
        if expanded:
            b.node(
                "attention_expanded", f"{layer}.expanded", [*read, q, values], [values],
                {"uk": self.uk, "uv": self.uv}, nope=self.nope, dv=self.dv, **attrs,
            )  # fmt: skip
        out = b.buffer(f"{layer}.attended", "T", self.o.N)
        b.node("linear", f"{layer}.o", [values], [out], _weights(self.o, self.o_bias))
        return out


@dataclass(frozen=True)
class GQA:
    """Attention with grouped queries; norms of queries and keys, biases and a window where a
    family has them."""

    qkv: PackedMatrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    o: PackedMatrix
    o_bias: torch.Tensor | None
    NH: int
    KVH: int
    D: int
    scale: float
    window: int

    @classmethod
    def make(cls, module: Any, name: str, packing: Packing) -> GQA:
        """From an attention module with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``."""
        names = [f"{name}.{part}_proj" for part in "qkv"]
        matrix = packing.matrix(*(f"{part}.weight" for part in names))
        o, D = packing.matrix(f"{name}.o_proj.weight"), module.head_dim
        norm = getattr(module, "q_norm", None)
        return cls(
            qkv=matrix,
            qkv_bias=packing.bias(matrix, *(f"{part}.bias" for part in names)),
            q_norm=packing.vector(f"{name}.q_norm.weight") if norm is not None else None,
            k_norm=packing.vector(f"{name}.k_norm.weight") if norm is not None else None,
            eps=norm.variance_epsilon if norm is not None else 0.0,
            o=o,
            o_bias=packing.bias(o, f"{name}.o_proj.bias"),
            NH=module.q_proj.out_features // D,
            KVH=module.k_proj.out_features // D,
            D=D,
            scale=module.scaling,
            window=getattr(module, "sliding_window", None) or 0,
        )

    @staticmethod
    def cached(module: Any, pages: Pages) -> dict[str, Part]:
        """The parts of such a module's cache."""
        D = module.head_dim
        return pages.grouped(module.k_proj.out_features // D, D)

    @staticmethod
    def head(module: Any) -> tuple[int, int]:
        """Numbers of a key and of a value, as attention sees them."""
        return module.head_dim, module.head_dim

    def caches(self, pages: Pages) -> dict[str, Part]:
        return pages.grouped(self.KVH, self.D)

    def lower(self, b: Builder, layer: str, x: str, pages: Pages) -> str:
        qkv = b.buffer(f"{layer}.qkv", "T", self.qkv.N)
        b.node("linear", f"{layer}.qkv", [x], [qkv], _weights(self.qkv, self.qkv_bias))
        cache = _buffers(b, layer, self.caches(pages))
        k, *rest = cache.values()
        q = b.buffer(f"{layer}.q", "T", self.NH, self.D)
        norms = {} if self.q_norm is None else {"q": self.q_norm, "k": self.k_norm}
        b.node(
            "gqa_write", f"{layer}.write", [qkv, "rope", "slots"], [q, *cache.values()], norms,
            heads=self.NH, eps=self.eps,
        )  # fmt: skip
        values = b.buffer(f"{layer}.values", "T", self.NH * self.D)
        b.node(
            "attention", f"{layer}.attention",
            [q, k, "positions", "sequences", "page_table", *rest], [values], heads=self.NH,
            kv_heads=self.KVH, dk=self.D, dv=self.D, scale=self.scale, window=self.window,
            parts=tuple(cache),
        )  # fmt: skip
        out = b.buffer(f"{layer}.attended", "T", self.o.N)
        b.node("linear", f"{layer}.o", [values], [out], _weights(self.o, self.o_bias))
        return out


def _buffers(b: Builder, layer: str, parts: dict[str, Part]) -> dict[str, str]:
    """Buffers of a layer's cache, by its parts."""
    return {
        name: b.buffer(f"{layer}.{name}", *part.shape, dtype=part.dtype, kind="cache")
        for name, part in parts.items()
    }


def _weights(matrix: PackedMatrix, bias: torch.Tensor | None) -> dict[str, Any]:
    return {"weight": matrix} if bias is None else {"weight": matrix, "bias": bias}
