"""Layers whose branches are normed before and behind, with experts beside an MLP (Gemma 4).

    h = x + norm(attention(norm(x)))
    x = (h + norm(norm(mlp(norm(h))) + norm(experts(norm(h))))) * scale

Without experts the MLP has no norm of its own behind it. The router reads a norm of ``h``, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pykernels.shapes import RouterSpec
from runtime.program import Builder, repeated
from runtime.program.weight_spec import WeightSpec

from .attention import Attention, eps_of
from .families import Family, mlp_spec
from .mixer import mixer
from .moe import Dense, MoE, experts_of
from .specs import Specs


@dataclass(frozen=True)
class ExpertsBeside:
    """Routed experts beside an MLP, and their norms.

    Attributes:
        route_norm: of what the router reads.
        mlp_norm: of the MLP's result.
        input_norm: before the experts; ``result_norm``: behind them.
    """

    moe: MoE
    route_norm: WeightSpec
    mlp_norm: WeightSpec
    input_norm: WeightSpec
    result_norm: WeightSpec


@dataclass(frozen=True)
class SandwichLayer:
    """One layer's weights.

    Attributes:
        attended_norm: behind attention.
        mlp_norm: before the MLP; ``result_norm``: of what it and the experts give together.
        scale: [1], of what the layer hands on.
    """

    input_norm: WeightSpec
    attention: Attention
    attended_norm: WeightSpec
    mlp_norm: WeightSpec
    mlp: Dense
    beside: ExpertsBeside | None
    result_norm: WeightSpec
    scale: WeightSpec
    eps: float

    @property
    def moe(self) -> MoE | None:
        """Its routed experts."""
        return None if self.beside is None else self.beside.moe

    @classmethod
    def make(
        cls, layer: Any, name: str, specs: Specs, family: Family, config: Any
    ) -> SandwichLayer:
        """From a layer with ``pre_feedforward_layernorm`` and its like."""
        leaf, module, kind = mixer(layer)
        beside = getattr(layer, "experts", None) is not None
        return cls(
            input_norm=specs.vector(f"{name}.input_layernorm.weight"),
            attention=kind.make(module, f"{name}.{leaf}", specs, family),
            attended_norm=specs.vector(f"{name}.post_attention_layernorm.weight"),
            mlp_norm=specs.vector(f"{name}.pre_feedforward_layernorm.weight"),
            mlp=Dense.make(f"{name}.mlp", specs, family.names, mlp_spec(config)),
            beside=_beside(layer, name, specs, config) if beside else None,
            result_norm=specs.vector(f"{name}.post_feedforward_layernorm.weight"),
            scale=specs.vector(f"{name}.layer_scalar"),
            eps=eps_of(layer.input_layernorm),
        )

    def lower(self, b: Builder, name: str, x: str, cache: Mapping[str, str]) -> str:
        """Adds its nodes; returns the buffer [T, H] of the residual stream behind it.

        Args:
            x: the residual stream before it; ``cache``: what attention keeps.
        """
        normed = self._norm(b, f"{name}.input_norm", self.input_norm, x)
        with b.marked(role="attention"):
            attended = self.attention.lower(b, name, normed, cache)
        h = self._join(b, f"{name}.attended_norm", self.attended_norm, [attended], x)
        to_mlp = self._norm(b, f"{name}.mlp_norm", self.mlp_norm, h)
        if self.beside is None:
            result = self.mlp.lower(b, name, to_mlp)
        else:
            result = [self._experts(b, name, h, to_mlp, self.beside)]
        return self._join(b, f"{name}.result_norm", self.result_norm, result, h, self.scale)

    def _experts(self, b: Builder, name: str, h: str, to_mlp: str, beside: ExpertsBeside) -> str:
        """What the MLP and the experts give together."""
        to_route = self._norm(b, f"{name}.route_norm", beside.route_norm, h)
        to_experts = self._norm(b, f"{name}.experts_norm", beside.input_norm, h)
        routed = beside.moe.lower(b, name, to_experts, to_route)
        dense = self.mlp.lower(b, name, to_mlp)
        given = self._join(b, f"{name}.dense_norm", beside.mlp_norm, dense)
        return self._join(b, f"{name}.routed_norm", beside.result_norm, routed, given)

    def _norm(self, b: Builder, name: str, weight: WeightSpec, x: str) -> str:
        out = b.buffer(f"{name}.out", "T", *weight.shape)
        b.node("rms_norm", name, {"x": x}, {"out": out}, {"weight": weight}, eps=self.eps)
        return out

    def _join(
        self,
        b: Builder,
        name: str,
        weight: WeightSpec,
        adds: Sequence[str],
        x: str | None = None,
        scale: WeightSpec | None = None,
    ) -> str:
        """The residual stream ``x`` with the norm of what a branch gives."""
        out = b.buffer(f"{name}.out", "T", *weight.shape)
        inputs = {**({} if x is None else {"x": x}), **repeated("add", adds)}
        weights = {"weight": weight, "scale": scale}
        b.node("post_norm", name, inputs, {"out": out}, weights, eps=self.eps)
        return out


def _beside(layer: Any, name: str, specs: Specs, config: Any) -> ExpertsBeside:
    experts = experts_of(layer)
    assert experts is not None
    moe = MoE(
        gate=specs.linear(f"{name}.router.proj"),
        choice_bias=None,
        spec=RouterSpec(topk=config.top_k_experts),
        experts=specs.experts(experts),
        activations=experts.activations,
        shared=None,
        shared_gate=None,
        factors=specs.vector(f"{name}.router.per_expert_scale"),
    )
    return ExpertsBeside(
        moe=moe,
        route_norm=specs.vector(f"{name}.router.scale", "over root"),
        mlp_norm=specs.vector(f"{name}.post_feedforward_layernorm_1.weight"),
        input_norm=specs.vector(f"{name}.pre_feedforward_layernorm_2.weight"),
        result_norm=specs.vector(f"{name}.post_feedforward_layernorm_2.weight"),
    )
