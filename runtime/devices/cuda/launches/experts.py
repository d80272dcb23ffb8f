"""Routing and experts that are on the GPU, as launches."""

from __future__ import annotations

import torch

from pykernels.gpu.moe.experts import Experts
from pykernels.gpu.moe.fused_moe import down, gate_up
from pykernels.gpu.moe.fused_moe import moe_ffn as run_experts
from pykernels.gpu.moe.permute import empty_order, sort_pairs
from pykernels.gpu.moe.place_routing import place_routing as place
from pykernels.gpu.moe.rank_experts import rank_experts as rank
from pykernels.gpu.moe.router import route
from pykernels.gpu.moe.router import router as choose
from pykernels.gpu.moe.split_routing import split_routing as split_by_weight
from pykernels.shapes import Routing

from ....program.lanes import lane_name
from ....program.node import Node
from ..memory.buffers import Memory
from .dense import Launch, void
from .streamed import experts_within


def router(m: Memory, node: Node) -> Launch:
    logits = m.read(node, "logits")[:, : node.attr("experts")]  # [T, E]
    out = Routing(m.written(node, "ids"), m.written(node, "weights"))
    bias = m.optional_weight(node, "bias")
    if len(logits) == 1:  # never padding: the choice and its order are one launch
        order = empty_order(1, out.topk, node.attr("experts"), m.device)
        m.orders[node.outputs["ids"]] = order
        return lambda: void(route(logits, node.attr("spec"), bias, None, (out, order, None)))
    # -1: padding takes no experts.
    spec, here = node.attr("spec"), m.inputs.get(lane_name(node.lane, "slot_mapping"))
    return lambda: void(choose(logits.contiguous(), spec, bias, here, out))


def split_routing(m: Memory, node: Node) -> Launch:
    ids, factors, last = m.read(node, "ids"), m.read(node, "weights"), node.attr("last")
    second = m.written(node, "last_ids") if "last_ids" in node.outputs else None
    outs, whole = (m.written(node, "first_ids"), second), m.optional(node, "whole")
    return lambda: void(split_by_weight(ids, factors, last, outs, whole))


def place_routing(m: Memory, node: Node) -> Launch:
    ids, slots = m.read(node, "ids"), m.read(node, "slots")
    out = m.written(node, "here_ids"), m.written(node, "there_ids")
    return lambda: void(place(ids, slots, out))


def rank_experts(m: Memory, node: Node) -> Launch:
    ids, slots, order = m.read(node, "ids"), m.written(node, "slots"), m.written(node, "order")
    return lambda: void(rank(ids, len(slots), len(order), (slots, order)))


def moe_ffn(m: Memory, node: Node) -> Launch:
    x, out = m.read(node, "x"), m.written(node, "out")
    resident = m.optional(node, "resident")
    if resident is None:
        experts = m.weight(node, "experts")
    else:
        experts = experts_within(m.program.weight(node, "experts"), resident)
    ids, factors = m.optional(node, "ids"), m.optional(node, "weights")
    if ids is None or factors is None:
        return _one_expert(m, x, experts, out)
    own, own_factors = ids, factors
    order = m.orders.get(node.inputs["ids"])
    return lambda: void(run_experts(x, own, own_factors, experts, out=out, order=order))


def _one_expert(m: Memory, x: torch.Tensor, experts: Experts, out: torch.Tensor) -> Launch:
    """All tokens in their own order, so there is nothing to sort, to weight or to sum."""
    if len(x) not in m.same_orders:
        same = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
        m.same_orders[len(x)] = sort_pairs(same, 1)
    order = m.same_orders[len(x)]

    def launch() -> None:
        y = down(gate_up(x, experts, order), experts, order, out=out if bf16 else None)
        if not bf16:
            out.copy_(y)

    bf16 = out.dtype == torch.bfloat16
    return launch
