"""Routed experts on another device (SOSP'25 3.3): each becomes a submit and a wait.

The submit stands where the experts stood and returns at once; the wait stands before the first
node that reads what they give. Everything between runs beside the experts: the shared experts, and
with ``defer`` the whole of the next layer up to its own sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..program import Buffer, Node, Program
from .layers import rebuilt


def offload(program: Program, device: str = "cpu") -> Program:
    """The program with its routed experts on ``device``."""
    nodes: list[Node] = []
    buffers: dict[str, Buffer] = {}
    waiting: dict[str, Node] = {}  # what experts give -> its wait
    for node in program.nodes:
        for name in node.inputs:
            if name in waiting:
                nodes.append(waiting.pop(name))
        if node.op != "moe_ffn" or len(node.inputs) != 3 or node.weights["experts"].shape.E == 1:
            nodes.append(node)
            continue
        ticket = f"{node.name}.ticket"
        buffers[ticket] = Buffer(ticket, (1,), torch.int64)
        nodes.append(
            replace(node, op="submit", outputs=(ticket,), device=device, name=f"{node.name}.submit")
        )
        waiting[node.outputs[0]] = Node(
            "wait", (ticket,), node.outputs, device=node.device, name=f"{node.name}.wait"
        )
    return rebuilt(program, nodes, buffers)
