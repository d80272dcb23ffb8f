"""What passes need to see in a program: its layers of routed experts, and a choice in two parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program

LEAST = 2
"""Experts of a token that stay as they are, at the least (SOSP'25 4.2)."""


@dataclass(frozen=True)
class MoELayer:
    """One layer of routed experts in a program.

    Attributes:
        router, experts: the nodes; ``experts`` reads ``router``'s outputs.
        sum: the name of the buffer [T, H] that the experts write, which the next norm adds up.
        topk: experts of a token.
    """

    router: Node
    experts: Node
    sum: str
    topk: int


def moe_layers(program: Program) -> tuple[MoELayer, ...]:
    """The layers of routed experts, in order; an expert that every token takes is none."""
    routers = {
        node.outputs[0]: node
        for node in program.nodes
        if node.op == "router" and node.attrs["experts"] > 1
    }
    return tuple(
        MoELayer(routers[node.inputs[1]], node, node.outputs[0], program.shape(node.inputs[1])[1])
        for node in program.nodes
        if node.op == "moe_ffn" and len(node.inputs) == 3 and node.inputs[1] in routers
    )


def check_count(program: Program, layers: tuple[MoELayer, ...], N: int, least: int) -> None:
    """Raises PykernelsError unless N of each layer's experts may be taken out of their place."""
    check_topk(program.name, [layer.topk for layer in layers], N, least)


def check_topk(name: str, topks: Sequence[int], N: int, least: int = LEAST) -> None:
    """``check_count`` of a model of that name, by the experts of a token in each of its layers."""
    if not topks:
        raise PykernelsError(f"{name!r} has no routed experts", "Use it as it is")
    topk = min(topks)
    most = max(0, topk - least)
    if not 0 <= N <= most:
        raise PykernelsError(
            f"{N} of {topk} experts of a token are too many: {least} stay where they are",
            f"Use 0 to {most}",
        )


@dataclass(frozen=True)
class Split:
    """A layer's choice in two parts.

    Attributes:
        nodes: that take the place of the layer's experts.
        buffers: that they write.
        rest: the sum [T, H] of the second part; None: it is dropped.
    """

    nodes: tuple[Node, ...]
    buffers: Mapping[str, Buffer]
    rest: str | None


def split(program: Program, layer: MoELayer, N: int, name: str, keep: bool) -> Split:
    """The experts of the topk - N largest weights as the layer's own, the others beside them.

    Args:
        name: of the second part.
        keep: whether the second part is computed; its sum is then ``Split.rest``.
    """
    node = layer.experts
    x, ids, weights = node.inputs
    base = node.name
    parts = [("first", layer.topk - N), *([(name, N)] if keep else [])]
    buffers: dict[str, Buffer] = {}
    outputs: list[str] = []
    for part, width in parts:
        for source in (ids, weights):
            buffer = replace(
                program.buffers[source], name=f"{source}.{part}", shape=("T", width)
            )  # fmt: skip
            buffers[buffer.name] = buffer
            outputs.append(buffer.name)
    routing = Node(
        "split_routing", (ids, weights), tuple(outputs), attrs=MappingProxyType({"last": N}),
        device=node.device, name=f"{base}.split",
    )  # fmt: skip
    own = replace(node, inputs=(x, *outputs[:2]))
    if not keep:
        return Split((routing, own), buffers, None)
    rest = f"{layer.sum}.{name}"
    buffers[rest] = replace(program.buffers[layer.sum], name=rest)
    other = replace(node, inputs=(x, *outputs[2:]), outputs=(rest,), name=f"{base}.{name}")
    return Split((routing, own, other), buffers, rest)


def rebuilt(program: Program, nodes: list[Node], buffers: Mapping[str, Buffer]) -> Program:
    """The program with other nodes, more buffers, and without those that nothing names now."""
    named = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    every = {**program.buffers, **buffers}
    kept = {
        name: buffer
        for name, buffer in every.items()
        if name in named or buffer.kind not in ("scratch",)
    }
    return replace(program, nodes=tuple(nodes), buffers=kept).check()
