"""Some experts of each layer beside the others on another device (Fiddler, arXiv 2402.07033).

A layer's choice is parted by where its experts are: those in slots of the device that routes are
computed there, the others where the layer's experts are, both at once; the next norm adds both.
A table per layer says which expert is in which slot. A step reads it anew, so slots can be filled
with other experts between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program, repeated
from ..program.op_table.sandwich import NORMS
from ..program.weight_spec import WeightSpec
from .layers import MoELayer, moe_layers, rebuilt
from .order import ordered

BY_ROUTER: Mapping[int, str] = MappingProxyType({})
"""Slots of each layer are on the device of its router."""


@ordered
def gpu_experts(
    program: Program,
    chosen: Mapping[int, Sequence[int]],
    devices: Mapping[int, str] = BY_ROUTER,
) -> Program:
    """The program with some experts on another device, too.

    Args:
        chosen: by layer, the experts that begin in its slots, one a slot.
        devices: by layer, that which has its slots; else that of the layer's router.

    Raises:
        PykernelsError: experts or routed layers that there are not; some are deferred,
            streamed, or on that device already.
    """

    def some(layer: int, experts: WeightSpec) -> WeightSpec:
        return experts.some(chosen[layer])

    return in_expert_slots(program, [layer for layer in chosen if chosen[layer]], some, devices)


def in_expert_slots(
    program: Program,
    layers: Sequence[int],
    weight: Callable[[int, WeightSpec], WeightSpec],
    devices: Mapping[int, str] = BY_ROUTER,
) -> Program:
    """The program with the choices of some layers parted by a table of slots.

    Args:
        weight: of a layer and its experts, what is in its slots.
        devices: see ``gpu_experts``.

    Raises:
        PykernelsError: as ``gpu_experts``.
    """
    routed = {layer.experts.layer: layer for layer in moe_layers(program)}
    if unknown := [number for number in layers if number not in routed]:
        raise PykernelsError(
            f"layer {unknown[0]} of {program.name!r} has no routed experts", "Leave it out"
        )
    parts = [
        _part(
            program,
            routed[number],
            weight(number, _experts(program, routed[number])),
            devices.get(number),
        )
        for number in layers
    ]
    behind = {part.router: part.place for part in parts}
    moved = {part.layer.experts.name: part for part in parts}
    joins = {part.layer.sum: part.sum for part in parts}
    nodes: list[Node] = []
    for node in program.nodes:
        if node.name in moved:
            part = moved[node.name]
            nodes += [part.rest, part.cached]
            continue
        late = [joins.pop(name) for name in node.series("add") if name in joins]
        if node.op in NORMS and late:
            adds = repeated("add", (*node.series("add"), *late))
            node = replace(node, inputs={**node.inputs, **adds})
        nodes.append(node)
        if node.name in behind:  # at once, so that the other device begins
            nodes.append(behind[node.name])
    if joins:
        raise PykernelsError(
            f"no norm adds up {', '.join(joins)} of {program.name!r}",
            "Apply gpu_experts before the pass that moved that sum",
        )
    weights = {**program.weights, **{part.weight.name: part.weight for part in parts}}
    buffers = {name: buffer for part in parts for name, buffer in part.buffers.items()}
    return rebuilt(replace(program, weights=weights), nodes, buffers)


def expert_slot_tables(program: Program) -> dict[str, torch.Tensor]:
    """The tables of a program's layers as they are at first, int32 [E] on the CPU, by buffer: the
    place of each expert among those of the node that reads it, or -1; all -1 where its slots are
    empty."""
    tables: dict[str, torch.Tensor] = {}
    for place in program.nodes:
        if place.op == "place_routing":
            name, ids = place.inputs["slots"], place.outputs["local_ids"]
            reader = next(n for n in program.nodes if ids in n.reads and "experts" in n.weights)
            spec = program.weight(reader, "experts")
            table = torch.full(program.shape(name), -1, dtype=torch.int32, device="cpu")
            numbers = torch.arange(len(spec.expert_ids), dtype=torch.int32, device="cpu")
            table[list(spec.expert_ids)] = numbers
            tables[name] = table
    return tables


@dataclass(frozen=True)
class _Part:
    """What becomes of one layer.

    Attributes:
        router: the node behind which ``place`` stands, which parts the choice.
        rest, cached: the layer's experts that are left, and those in slots, of ``weight``; they
            take the place of the layer's.
        buffers: that the three need.
    """

    layer: MoELayer
    router: str
    place: Node
    rest: Node
    cached: Node
    weight: WeightSpec
    buffers: Mapping[str, Buffer]

    @property
    def sum(self) -> str:
        """The buffer [T, H] of those in slots."""
        return self.cached.outputs["out"]


def _experts(program: Program, layer: MoELayer) -> WeightSpec:
    return program.weight(layer.experts, "experts")


def _part(program: Program, layer: MoELayer, weight: WeightSpec, device: str | None) -> _Part:
    node = layer.experts
    ids = replace(program.buffers[node.inputs["ids"]], kind="scratch")  # of its parts
    whole = _experts(program, layer)
    router = program.writers[ids.name]
    slots = f"{node.name}.slots"
    gpu_ids, cpu_ids = f"{ids.name}.cached", f"{ids.name}.without_cached"
    total = f"{layer.sum}.cached"
    place = Node(
        "place_routing",
        {"ids": ids.name, "slots": slots},
        {"local_ids": gpu_ids, "remote_ids": cpu_ids},
        device=device or router.device,
        name=f"{node.name}.cached_place",
        layer=node.layer,
        role="router",
    )
    rest = replace(node, inputs={**node.inputs, "ids": cpu_ids})
    cached = replace(
        node,
        inputs={**node.inputs, "ids": gpu_ids},
        outputs={"out": total},
        weights=MappingProxyType({**node.weights, "experts": weight.name}),
        device=device or router.device,
        name=f"{node.name}.cached",
        role="cached",
    )
    buffers = {
        slots: Buffer(slots, (whole.shape[0],), torch.int32, "cache"),
        gpu_ids: replace(ids, name=gpu_ids),
        cpu_ids: replace(ids, name=cpu_ids),
        total: replace(program.buffers[layer.sum], name=total),
    }
    return _Part(layer, router.name, place, rest, cached, weight, buffers)
