"""Routing and experts that are on the GPU, as launches."""

from __future__ import annotations

import torch

from pykernels.gpu.moe.fused_moe import moe_ffn as run_experts
from pykernels.gpu.moe.place_routing import place_routing as place
from pykernels.gpu.moe.router import router as choose
from pykernels.ref.router import split_routing as split_by_weight
from pykernels.shapes import Routing

from ...node import Node
from .dense import Launch, void
from .memory import Memory


def router(m: Memory, node: Node) -> Launch:
    logits = m.read(node, "logits")[:, : node.attr("experts")]  # [T, E]
    out = Routing(m.written(node, "ids"), m.written(node, "weights"))
    bias = m.optional_weight(node, "bias")
    spec = node.attr("spec")
    return lambda: void(choose(logits.contiguous(), spec, bias, out))


def split_routing(m: Memory, node: Node) -> Launch:
    ids, factors, last = m.read(node, "ids"), m.read(node, "weights"), node.attr("last")
    outs = [m.written(node, port) for port in ("first_ids", "last_ids") if port in node.outputs]

    def launch() -> None:
        for out, part in zip(outs, split_by_weight(ids, factors, last), strict=False):
            out.copy_(part)

    return launch


def place_routing(m: Memory, node: Node) -> Launch:
    ids, slots = m.read(node, "ids"), m.read(node, "slots")
    out = m.written(node, "here_ids"), m.written(node, "there_ids")
    return lambda: void(place(ids, slots, out))


def moe_ffn(m: Memory, node: Node) -> Launch:
    x, out = m.read(node, "x"), m.written(node, "out")
    experts = m.weight(node, "experts")
    ids, factors = m.optional(node, "ids"), m.optional(node, "weights")
    if ids is None or factors is None:  # every token takes the one expert
        ids = torch.zeros(len(x), 1, dtype=torch.int32, device=m.device)
        factors = torch.ones(len(x), 1, dtype=torch.float32, device=m.device)
    own, own_factors = ids, factors
    return lambda: void(run_experts(x, own, own_factors, experts, out=out))
