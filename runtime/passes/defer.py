"""Expert Deferral (SOSP'25 4.1): a layer's least experts are added one layer later.

    O_k = I_k + S_k(I_k) + R_k^imm(I_k) + R_(k-1)^def(I_(k-1))

The experts of the ``topk - N`` largest weights are immediate, those of the N smallest are deferred:
what they give joins the residual stream where the *next* layer of routed experts adds up its own.
Nothing is deferred out of the last layer, which adds all of its experts and the deferred ones of
the layer before. On one device this changes what is computed and gains nothing; where a CPU has
the experts and a GPU the rest, the attention of layer k + 1 need not wait for the deferred of k.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program, repeated
from .layers import LEAST, check_count, moe_layers, rebuilt, split


def defer(program: Program, N: int, least: int = LEAST) -> Program:
    """The program of a decode step with N of each token's experts deferred.

    Args:
        N: 0: the program itself.
        least: immediate experts at the least.

    Raises:
        PykernelsError: no routed experts, or fewer than ``least`` immediate ones.
    """
    if N == 0:
        return program
    if any(node.op == "rank_experts" for node in program.nodes):
        raise PykernelsError(
            f"defer after split_experts would defer others in each step of {program.name!r}",
            "Apply defer to decode steps, and split_experts to prompts",
        )
    layers = moe_layers(program)
    check_count(program, layers, N, least)
    nodes: list[Node] = []
    buffers: dict[str, Buffer] = {}
    by_node = {layer.experts.name: i for i, layer in enumerate(layers)}
    joins: dict[str, str] = {}  # sum of layer k + 1 -> what of layer k is added beside it
    for node in program.nodes:
        at = by_node.get(node.name)
        if at is not None and at + 1 < len(layers):
            parts = split(program, layers[at], N, "deferred", "deferred")
            nodes += parts.nodes
            buffers |= parts.buffers
            assert parts.rest is not None
            joins[layers[at + 1].sum] = parts.rest
            continue
        if node.op == "rms_norm":
            adds = node.series("add")
            late = [joins.pop(name) for name in adds if name in joins]
            if late:
                node = replace(node, inputs={**node.inputs, **repeated("add", (*late, *adds))})
        nodes.append(node)
    if joins:
        raise PykernelsError(
            f"no norm adds up {', '.join(joins)} of {program.name!r}",
            "Defer before the pass that moved that sum",
        )
    return rebuilt(program, nodes, buffers)


def fewest_deferred(topk: int, expert_s: float, other_s: float, least: int = LEAST) -> int:
    """How many experts to defer so that the CPU is never idle (SOSP'25 4.2): as few as keep it
    busy while the rest of a layer runs.

    Args:
        expert_s: seconds of one expert of one token on the CPU.
        other_s: seconds in which the other device computes what stands between two layers'
            experts; 0 where there is no other device, and nothing is gained.
    """
    if other_s <= 0 or expert_s <= 0:
        return 0
    return max(0, min(math.ceil(other_s / expert_s), topk - least))
