"""What follows attention in a layer: a dense MLP, or routed experts with shared ones beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pykernels.quant import PackedExperts
from pykernels.shapes import RouterSpec
from runtime.matrix import PackedMatrix
from runtime.program import Builder

from ..modules.moe import FusedMoE
from .weights import Packing


@dataclass(frozen=True)
class Dense:
    """A gated MLP."""

    mlp: PackedExperts

    @classmethod
    def make(cls, name: str, packing: Packing) -> Dense:
        """From ``gate_proj``, ``up_proj`` and ``down_proj``."""
        return cls(packing.mlp(*(f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))))

    def lower(self, b: Builder, layer: str, x: str) -> list[str]:
        """Adds its nodes; returns the buffers [T, H] whose sum is its result."""
        out = b.buffer(f"{layer}.mlp_out", "T", self.mlp.shape.H)
        b.node("moe_ffn", f"{layer}.mlp", [x], [out], {"experts": Experts(self.mlp)})
        return [out]


@dataclass(frozen=True)
class Experts:
    """Packed experts, as a program prints them."""

    packed: PackedExperts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)

    def __str__(self) -> str:
        s = self.packed.shape
        return f"{self.packed.fmt.name} {s.E} x [{s.I}, {s.H}]"


@dataclass(frozen=True)
class MoE:
    """Routed experts, a router, and what every token passes through beside them.

    Attributes:
        shared: a gated MLP; ``shared_gate``: its factor is the sigmoid of this linear.
    """

    gate: PackedMatrix
    gate_bias: torch.Tensor | None
    spec: RouterSpec
    experts: PackedExperts
    activations: str
    shared: PackedExperts | None
    shared_gate: PackedMatrix | None

    @classmethod
    def make(cls, module: FusedMoE, name: str, packing: Packing) -> MoE:
        """From an injected block."""
        shared = next((s for s in ("shared_experts", "shared_expert") if hasattr(module, s)), None)
        parts = [f"{name}.{shared}.{part}_proj.weight" for part in ("gate", "up", "down")]
        gated = hasattr(module, "shared_expert_gate")
        return cls(
            gate=packing.matrix(f"{name}.gate.weight"),
            gate_bias=packing.tensor(f"{name}.gate.e_score_correction_bias"),
            spec=router_spec(module.gate),
            experts=packing.experts(module),
            activations=module.activations,
            shared=packing.mlp(*parts) if shared else None,
            shared_gate=packing.matrix(f"{name}.shared_expert_gate.weight") if gated else None,
        )

    def lower(self, b: Builder, layer: str, x: str) -> list[str]:
        """Adds its nodes; returns the buffers [T, H] whose sum is its result."""
        E, H, topk = self.experts.shape.E, self.experts.shape.H, self.spec.topk
        logits = b.buffer(f"{layer}.logits", "T", E)
        b.node("linear", f"{layer}.gate", [x], [logits], {"weight": self.gate})
        ids = b.buffer(f"{layer}.ids", "T", topk, dtype=torch.int64)
        weights = b.buffer(f"{layer}.weights", "T", topk)
        bias = {} if self.gate_bias is None else {"bias": self.gate_bias}
        b.node(
            "router", f"{layer}.router", [logits], [ids, weights], bias, spec=self.spec, experts=E
        )
        routed = b.buffer(f"{layer}.routed", "T", H)
        b.node(
            "moe_ffn", f"{layer}.experts", [x, ids, weights], [routed],
            {"experts": Experts(self.experts)}, activations=self.activations,
        )  # fmt: skip
        if self.shared is None:
            return [routed]
        shared = b.buffer(f"{layer}.shared_out", "T", H)
        inputs = [x]
        if self.shared_gate is not None:
            gate = b.buffer(f"{layer}.shared_gate", "T", 1)
            b.node("linear", f"{layer}.gate_shared", [x], [gate], {"weight": self.shared_gate})
            zero = b.buffer(f"{layer}.shared_id", "T", 1, dtype=torch.int64)
            factor = b.buffer(f"{layer}.shared_factor", "T", 1)
            one = RouterSpec(topk=1, scoring="sigmoid", renormalize=False)
            b.node("router", f"{layer}.factor", [gate], [zero, factor], spec=one, experts=1)
            inputs += [zero, factor]
        b.node("moe_ffn", f"{layer}.shared", inputs, [shared], {"experts": Experts(self.shared)})
        return [routed, shared]


def router_spec(gate: Any) -> RouterSpec:
    """How a Hugging Face router chooses, from its attributes and its family."""
    family = type(gate).__module__.rpartition(".")[2].removeprefix("modeling_")
    common = {"topk": gate.top_k, "scale": float(getattr(gate, "routed_scaling_factor", 1.0))}
    if hasattr(gate, "e_score_correction_bias"):  # DeepSeek-V3 and those that follow it
        return RouterSpec(
            **common, scoring="sigmoid", renormalize=gate.norm_topk_prob,
            groups=getattr(gate, "num_group", None) or gate.n_group, group_topk=gate.topk_group,
            group_score="top2",
        )  # fmt: skip
    if family == "deepseek_v2":
        grouped = gate.topk_method == "group_limited_greedy"
        return RouterSpec(
            **common, renormalize=False, groups=gate.num_group if grouped else 1,
            group_topk=gate.topk_group if grouped else 1,
        )  # fmt: skip
    # Mixtral always divides by the sum, Qwen as its config says.
    return RouterSpec(**common, renormalize=bool(getattr(gate, "norm_topk_prob", True)))
