"""What passes need to see in a program: its layers of routed experts, and a choice in two parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program
from ..program.analysis import experts_per_token, share_of_experts

LEAST = 2
"""Experts of a token that stay as they are, at the least (SOSP'25 4.2)."""


@dataclass(frozen=True)
class MoELayer:
    """One layer of routed experts in a program.

    Attributes:
        experts: the node of the layer with the role "routed".
        sum: the buffer [T, H] that it writes, which the next norm adds up.
        topk: experts of a token that it computes, at most; ``share``: the part that it computes of
            those, if a token takes any with equal chance: less than 1 where others are "cached".
    """

    experts: Node
    sum: str
    topk: int
    share: float


def moe_layers(program: Program) -> tuple[MoELayer, ...]:
    """The layers of routed experts, in order, by the marks that lowering has set.

    Raises:
        PykernelsError: a layer has two nodes of that role.
    """
    layers = tuple(
        MoELayer(
            node,
            node.outputs["out"],
            experts_per_token(program, node.inputs["ids"]),
            share_of_experts(program, node),
        )
        for node in program.nodes
        if node.role == "routed" and "experts" in node.weights
    )
    numbers = [layer.experts.layer for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise PykernelsError(
            f"a layer of {program.name!r} has two nodes of routed experts",
            "Run the passes before the one that split them",
        )
    return layers


def check_routed(program: Program, option: str) -> None:
    """Raises PykernelsError for an option that is of routed experts, of which there are none."""
    if not moe_layers(program):
        raise PykernelsError(f"{program.name!r} has no routed experts", f"Leave out {option}")


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
            f"{N} experts: a token has {topk}, and {least} of them must stay",
            f"Use 0 to {most}",
        )


@dataclass(frozen=True)
class RoutingSplit:
    """A layer's choice in two parts.

    Attributes:
        replaced: by a node's name, what takes its place.
        buffers: buffers that they write.
        rests: the sums [T, H] of the second part, of the layer's experts and of those in slots;
            none: it is dropped.
    """

    replaced: Mapping[str, tuple[Node, ...]]
    buffers: Mapping[str, Buffer]
    rests: tuple[str, ...]


def split(
    program: Program,
    layer: MoELayer,
    N: int,
    name: str,
    role: str | None,
    whole: str | None = None,
) -> RoutingSplit:
    """Splits a layer's routing: the topk - N largest weights stay with the layer's experts, the N
    smallest go to a second node.

    Where experts are in slots, each part is placed by itself: which experts are in it follows from
    the weights alone, wherever they lie.

    Args:
        name: name of the second part.
        role: of the second node, whose sum is among ``RoutingSplit.rests``; None: there is none,
            and no experts are in slots.
        whole: the input [T] of tokens that are not split; None: all are.
    """
    node, number = layer.experts, ""
    names = {other.name for other in program.nodes}
    while f"{node.name}.{name}{number}_split" in names:  # the pass was here before
        number = str(int(number or 1) + 1)
    name = f"{name}{number}"
    read = node.inputs["ids"]
    writer = program.writers[read]
    place = writer if writer.op == "place_routing" else None
    whole_ids = read if place is None else place.inputs["ids"]
    ids = replace(program.buffers[whole_ids], kind="scratch")  # of its parts
    outputs = {"first_ids": f"{ids.name}.without_{name}"}
    if role is not None:
        outputs["last_ids"] = f"{ids.name}.{name}"
    buffers = {label: replace(ids, name=label) for label in outputs.values()}
    router = program.writers[ids.name]
    marks = {} if whole is None else {"whole": whole}
    routing = Node(
        "split_routing",
        {"ids": ids.name, "weights": node.inputs["weights"], **marks},
        outputs,
        attrs=MappingProxyType({"last": N}),
        device=router.device,
        name=f"{node.name}.{name}_split",
        layer=node.layer,
        role="router",
    )

    def second(first: Node, ids: str, role: str) -> Node:
        """Computes of the second part what ``first`` does of the first one."""
        total = first.outputs["out"]
        rest = f"{total}.{name}"
        buffers[rest] = replace(program.buffers[total], name=rest)
        inputs = {**first.inputs, "ids": ids}
        return replace(
            first, inputs=inputs, outputs={"out": rest}, name=f"{first.name}.{name}", role=role
        )

    if place is None:
        first_node = replace(node, inputs={**node.inputs, "ids": outputs["first_ids"]})
        others = () if role is None else (second(node, outputs["last_ids"], role),)
        rests = tuple(other.outputs["out"] for other in others)
        return RoutingSplit({node.name: (routing, first_node, *others)}, buffers, rests)
    assert role is not None
    cached = next(n for n in program.nodes if place.outputs["local_ids"] in n.inputs.values())
    parts = {port: f"{label}.{name}" for port, label in place.outputs.items()}
    buffers |= {parts[port]: replace(ids, name=parts[port]) for port in parts}
    first = replace(place, inputs={**place.inputs, "ids": outputs["first_ids"]})
    last = replace(
        place,
        inputs={**place.inputs, "ids": outputs["last_ids"]},
        outputs=parts,
        name=f"{place.name}.{name}",
    )
    rest, late = (
        second(node, parts["remote_ids"], role),
        second(cached, parts["local_ids"], "cached"),
    )
    replaced = {
        place.name: (routing, first, last),
        node.name: (node, rest),
        cached.name: (cached, late),
    }
    return RoutingSplit(replaced, buffers, (rest.outputs["out"], late.outputs["out"]))


def rebuilt(program: Program, nodes: list[Node], buffers: Mapping[str, Buffer]) -> Program:
    """The program with other nodes, more buffers, and without those that nothing names now."""
    named = {name for node in nodes for name in (*node.reads, *node.writes)}
    every = {**program.buffers, **buffers}
    kept = {
        name: buffer
        for name, buffer in every.items()
        if name in named or buffer.kind not in ("scratch",)
    }
    return replace(program, nodes=_submitted_early(nodes), buffers=kept).check()


def _submitted_early(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes; one that parts a choice for another device stands right behind the choice, before
    the shared experts, so that the other device begins at once."""
    placed = list[Node]()
    for node in nodes:
        if node.op == "split_routing" and any(
            other.device != node.device and set(other.reads) & set(node.writes) for other in nodes
        ):
            last = max(i for i, other in enumerate(placed) if set(other.writes) & set(node.reads))
            placed.insert(last + 1, node)
        else:
            placed.append(node)
    return tuple(placed)
