"""SmallEP (OSDI'26 3.2): expert parallelism of few ranks whose tokens differ.

All ranks gather all tokens, and each of them gates and sorts all of them; it computes its own
experts, and the weighted sums of a token that they give; these partial sums are added where the
token is. So 2 N H numbers cross, however many experts a token takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from ...program import Buffer, Node, Program
from ...program.op_table.collectives import ALL_TOKENS
from ...program.weight_spec import WeightSpec
from ..layers import rebuilt
from .experts import local, refuse_placed
from .striped import gathered
from .stripes import of_all

_OF_ALL = ("router", "routed", "deferred")


def small_ep(program: Program, rank: int, ranks: int, shares: Sequence[float] = ()) -> Program:
    """The program of a rank's tokens with its experts for all ranks' tokens.

    Args:
        shares: see ``experts_of_rank``.

    Raises:
        PykernelsError: more ranks than experts; experts that are streamed, or in slots.
    """
    refuse_placed(program)
    nodes: list[Node] = []
    weights: dict[str, WeightSpec] = dict(program.weights)
    buffers: dict[str, Buffer] = {}
    moved = [node for node in program.nodes if node.role in _OF_ALL]
    wide = {name for node in moved if node.op != "moe_ffn" for name in node.writes}
    every = replace(program, buffers={**program.buffers, **_widened(program, wide)})
    have: set[str] = set()
    for node in program.nodes:
        if node not in moved:
            nodes.append(node)
            continue
        inputs = dict(node.inputs)
        for port, name in node.inputs.items():
            if name in wide:
                continue
            if program.buffers[name].kind == "input":
                inputs[port] = of_all(name.partition(".")[2])
                buffers[inputs[port]] = Buffer(inputs[port], (ALL_TOKENS,), torch.int64, "input")
                continue
            inputs[port] = f"{name}.all"
            if name not in have:
                have.add(name)
                buffers |= _widened(program, {name}, ".all")
                nodes.append(gathered(node, name, inputs[port], ranks))
        node = replace(node, inputs=inputs)
        if node.op != "moe_ffn":
            nodes.append(node)
            continue
        out = node.outputs["out"]
        new_nodes, part = local(every, node, rank, ranks, weights, buffers, shares)
        buffers |= _widened(replace(program, buffers={**program.buffers, **buffers}), {part})
        nodes += [*new_nodes, _scattered(node, part, out, ranks)]
    buffers = {**_widened(program, wide), **buffers}
    return rebuilt(replace(program, weights=weights, rank=rank), nodes, buffers)


def _widened(program: Program, names: set[str], suffix: str = "") -> dict[str, Buffer]:
    """Buffers of all ranks' tokens instead of this one's."""
    originals = (program.buffers[name] for name in names)
    return {
        buffer.name + suffix: replace(
            buffer, name=buffer.name + suffix, shape=(ALL_TOKENS, *buffer.shape[1:])
        )
        for buffer in originals
    }


def _scattered(node: Node, part: str, out: str, ranks: int) -> Node:
    """The sum of all ranks' parts, of which each gets the rows of its tokens."""
    return Node(
        "reduce_scatter",
        {"x": part},
        {"out": out},
        attrs=MappingProxyType({"ranks": tuple(range(ranks))}),
        device=node.device,
        name=f"{node.name}.reduce_scatter",
        layer=node.layer,
        role=node.role,
    )
