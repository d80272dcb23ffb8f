"""Prompts of middle length on two devices (SMOE, Algorithm 1): of each layer the experts that most
tokens take cross to a GPU, while the CPU computes the others.

    router, rank_experts, place_routing, (CPU: the others), load 0, load 1, .., unpack 0, ..

An expert costs the link as much whatever its load, and the CPU the more, the more tokens take it;
so the heavy ones cross. The CPU has its part before the first load begins. How many cross is fixed
when the program is made: as many as take the link as long as the CPU takes for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..machine.nodes import ONE_NODE, MemoryNodes
from ..program import Buffer, Node, Program
from ..program.weight_spec import WeightSpec
from .gpu_experts import in_expert_slots
from .layers import moe_layers, rebuilt
from .order import ordered
from .stream_weights import StreamRing, streamed


@ordered
def split_experts(
    program: Program,
    share: float,
    resident_bytes: Callable[[WeightSpec], int],
    ring: StreamRing | None = None,
    nodes: MemoryNodes = ONE_NODE,
) -> Program:
    """The program with a share of each layer's experts computed on the device of its router, to
    which they cross, and the others where they are.

    Args:
        share: of a layer's experts, 0 to 1; one at the least crosses, and one stays.
        resident_bytes, ring, nodes: see ``stream_weights``.

    Raises:
        PykernelsError: no routed experts; some are deferred, streamed, or on that device already.
    """

    def some(_: int, experts: WeightSpec) -> WeightSpec:
        E = experts.shape[0]
        return experts.some(range(min(E - 1, max(1, round(share * E)))))

    layers = [layer.experts.layer for layer in moe_layers(program)]
    parted = in_expert_slots(program, [number for number in layers if number is not None], some)
    ranked, orders = _ranked(parted)
    moved = [node for node in ranked.nodes if node.role == "cached"]
    return streamed(ranked, moved, resident_bytes, ring or StreamRing(), nodes, orders)


def _ranked(program: Program) -> tuple[Program, dict[str, str]]:
    """The program with slots that each step fills by rank; and by node of the experts in them, the
    buffer of their order."""
    cached = {node.layer: node for node in program.nodes if node.role == "cached"}
    nodes, orders, buffers = list[Node](), dict[str, str](), dict[str, Buffer]()
    for node in program.nodes:
        if node.op == "place_routing":
            cached_node, slots = cached[node.layer], node.inputs["slots"]
            order = f"{cached_node.name}.order"
            count = program.weight(cached_node, "experts").shape[0]
            buffers[slots] = replace(program.buffers[slots], kind="scratch")
            buffers[order] = Buffer(order, (count,), torch.int32)
            orders[cached_node.name] = order
            rank = Node(
                "rank_experts",
                {"ids": node.inputs["ids"]},
                {"slots": slots, "order": order},
                device=node.device,
                name=f"{cached_node.name}_rank",
                layer=node.layer,
                role="router",
            )
            nodes.append(rank)
        nodes.append(node)
    return rebuilt(program, nodes, buffers), orders
