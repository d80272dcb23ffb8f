"""What follows attention in a layer: a dense MLP, or routed experts with shared ones beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.shapes import SWIGLU, ExpertSpec, RouterSpec
from runtime.program import Builder
from runtime.program.weight_spec import WeightSpec

from ..modules.moe import FusedMoE
from .families import FAMILIES, Family, Names
from .linear import Linear
from .specs import Specs

SHARED = ("shared_experts", "shared_expert")


@dataclass(frozen=True)
class Dense:
    """A gated MLP."""

    mlp: WeightSpec

    @classmethod
    def make(cls, name: str, specs: Specs, names: Names, spec: ExpertSpec = SWIGLU) -> Dense:
        """From the three linears of the module of that name.

        Args:
            spec: what it does beside its products.
        """
        return cls(specs.mlp(*names.of_mlp(name), spec))

    def lower(self, b: Builder, layer: str, x: str) -> list[str]:
        """Adds its nodes; returns the buffers [T, H] whose sum is its result."""
        out = b.buffer(f"{layer}.mlp_out", "T", self.mlp.shape[1])
        with b.marked(role="dense"):
            b.node("moe_ffn", f"{layer}.mlp", {"x": x}, {"out": out}, {"experts": self.mlp})
        return [out]


@dataclass(frozen=True)
class MoE:
    """Routed experts, a router, and what every token passes through beside them.

    Attributes:
        choice_bias: float32 [E], of the scores, for the choice alone.
        factors: float32 [E], of the experts' weights.
        shared: a gated MLP; ``shared_gate``: its factor is the sigmoid of this linear.
    """

    gate: Linear
    choice_bias: WeightSpec | None
    spec: RouterSpec
    experts: WeightSpec
    activations: str
    shared: WeightSpec | None
    shared_gate: WeightSpec | None
    factors: WeightSpec | None = None

    @classmethod
    def make(cls, block: Any, name: str, specs: Specs, family: Family) -> MoE:
        """From a block whose experts are ours."""
        experts = experts_of(block)
        assert experts is not None
        router = "gate" if hasattr(block, "gate") else "router"
        own = {leaf for leaf, _ in (*block.named_parameters(), *block.named_buffers())}
        names = family.names
        choice = next((leaf for leaf in own if leaf.endswith(names.choice_bias)), names.choice_bias)
        bias = specs.flat(f"{name}.{choice}")
        shared = next((leaf for leaf in SHARED if getattr(block, leaf, None) is not None), None)
        gated = hasattr(block, "shared_expert_gate")
        return cls(
            gate=specs.linear(f"{name}.{router}"),
            choice_bias=bias,
            spec=router_spec(getattr(block, router), family),
            experts=specs.experts(experts),
            activations=experts.activations,
            shared=specs.mlp(*names.of_mlp(f"{name}.{shared}")) if shared else None,
            shared_gate=specs.matrix(f"{name}.shared_expert_gate.weight") if gated else None,
        )

    def lower(self, b: Builder, layer: str, x: str, to_route: str | None = None) -> list[str]:
        """Adds its nodes; returns the buffers [T, H] whose sum is its result.

        Args:
            to_route: what the router reads; None: ``x``.
        """
        H = self.experts.shape[1]
        # In this order workers find tasks of the shared experts while one of them routes.
        gate = self._gate_shared(b, layer, x)
        routing = self._route(b, layer, to_route or x)
        shared = [] if self.shared is None else [self._lower_shared(b, layer, x, self.shared, gate)]
        routed = b.buffer(f"{layer}.routed", "T", H)
        with b.marked(role="routed"):
            b.node(
                "moe_ffn",
                f"{layer}.experts",
                {"x": x, **routing},
                {"out": routed},
                {"experts": self.experts},
                activations=self.activations,
            )
        return [routed, *shared]

    def _route(self, b: Builder, layer: str, x: str) -> dict[str, str]:
        """The router's nodes; the buffers of its choice."""
        E, topk = self.experts.shape[0], self.spec.topk
        with b.marked(role="router"):
            logits = self.gate.lower(b, f"{layer}.gate", x, f"{layer}.logits")
            routing = {
                "ids": b.buffer(f"{layer}.ids", "T", topk, dtype=torch.int64),
                "weights": b.buffer(f"{layer}.weights", "T", topk),
            }
            b.node(
                "router",
                f"{layer}.router",
                {"logits": logits},
                routing,
                {"bias": self.choice_bias, "factors": self.factors},
                spec=self.spec,
                experts=E,
            )
        return routing

    def _gate_shared(self, b: Builder, layer: str, x: str) -> str | None:
        """The linear whose sigmoid is the factor of what every token passes through; its buffer."""
        if self.shared_gate is None:
            return None
        gate = b.buffer(f"{layer}.shared_gate", "T", 1)
        with b.marked(role="shared"):
            weight = {"weight": self.shared_gate}
            b.node("linear", f"{layer}.gate_shared", {"x": x}, {"out": gate}, weight)
        return gate

    def _lower_shared(
        self, b: Builder, layer: str, x: str, shared: WeightSpec, gate: str | None
    ) -> str:
        """The nodes of what every token passes through; the buffer of its result.

        Args:
            gate: buffer [T, 1]; None: the factor is 1.
        """
        out = b.buffer(f"{layer}.shared_out", "T", shared.shape[1])
        inputs = {"x": x}
        with b.marked(role="shared"):
            if gate is not None:
                factor = {
                    "ids": b.buffer(f"{layer}.shared_id", "T", 1, dtype=torch.int64),
                    "weights": b.buffer(f"{layer}.shared_factor", "T", 1),
                }
                spec = RouterSpec(topk=1, scoring="sigmoid", renormalize=False)
                b.node("router", f"{layer}.factor", {"logits": gate}, factor, spec=spec, experts=1)
                inputs |= factor
            b.node("moe_ffn", f"{layer}.shared", inputs, {"out": out}, {"experts": shared})
        return out


def experts_of(block: Any) -> FusedMoE | None:
    """The experts of ours in a layer's MLP: itself, or a part of transformers' own block."""
    module = block if isinstance(block, FusedMoE) else getattr(block, "experts", None)
    return module if isinstance(module, FusedMoE) else None


def router_spec(gate: Any, family: Family) -> RouterSpec:
    """How a Hugging Face router chooses, from its attributes and its family's row."""
    groups = getattr(gate, "num_group", None) or getattr(gate, "n_group", None) or 1
    if getattr(gate, "topk_method", None) == "greedy":  # DeepSeek-V2-Lite has groups, unused
        groups = 1
    return RouterSpec(
        topk=gate.top_k,
        scoring=family.scoring,
        renormalize=bool(getattr(gate, "norm_topk_prob", family.renormalize)),
        groups=groups,
        group_topk=gate.topk_group if groups > 1 else 1,
        group_score="top2" if family.scoring == "sigmoid" else "max",
        min_sum=float(getattr(gate, "norm_min", 0.0)),
        scale=float(getattr(gate, "routed_scaling_factor", 1.0)),
    )


def check_experts(model: Any) -> None:
    """Raises PykernelsError for experts that rules have left to transformers."""
    names = FAMILIES[model.config.model_type].names
    for i, layer in enumerate(model.model.layers):
        block, beside = getattr(layer, names.mlp), getattr(layer, "experts", None)
        left = experts_of(block) is None and not hasattr(block, names.gate)
        if left or (beside is not None and experts_of(beside) is None):  # Gemma 4's are beside it
            name = f"model.layers.{i}" + (f".{names.mlp}" if left else "")
            raise PykernelsError(f"the experts of {name} have no kernel of ours", "Use --eager")
