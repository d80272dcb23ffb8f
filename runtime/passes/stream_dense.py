"""Dense weights that do not fit into a GPU's memory cross to it in every step (OSDI'26 3.1).

They lie in main memory in the GPU's own layout, so nothing unpacks them. Of a layer all come at
once, into one of a few slots that the layers take in turns:

    load 0, load 1, (layer 0), load 2, (layer 1), load 3, ..

A load waits until the layer that had its slot before is computed, and for nothing else: it runs in
a stream of its own (``Node.stream``) beside the layers in front. That order is the ordinary one of
nodes that share a buffer. Layers whose weights stay on the GPU give it time, so those that cross
are best spread over the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program
from ..program.ops import OPS
from .layers import rebuilt
from .order import ordered

STAGING_BUFFERS = 2
"""Buffers of each GPU: one layer is computed while the next one crosses."""
ALIGN = 256
"""Bytes: weights begin at multiples of it in a buffer."""
STAYING = ("routed", "cached", "deferred", "load")
"""Roles whose weights are experts, which have ways of their own."""


@dataclass
class _Layer:
    """A layer of one device whose weights cross.

    Attributes:
        first, last: numbers of the nodes that read them. weights: their names, in order.
    """

    first: int
    last: int
    device: str
    number: int
    weights: dict[str, None] = field(default_factory=dict)

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        return sum(-(-sizes[name] // ALIGN) * ALIGN for name in self.weights)


def dense_weights(program: Program, node: Node) -> Iterator[tuple[str, str]]:
    """(port, name) of the weights of a node that may cross: matrices of a layer, on its GPU. What
    is in no layer (embedding, head) and vectors stay where they are."""
    if node.layer is None or node.role in STAYING or "streamed" not in OPS[node.op].inputs:
        return
    if "resident" in node.inputs:
        return
    for port, name in node.weights.items():
        if program.weights[name].kind != "tensor":
            yield port, name


@ordered
def stream_dense(
    program: Program, sizes: Mapping[str, int], slots: int = STAGING_BUFFERS
) -> Program:
    """The program with these weights loaded in each step.

    Args:
        sizes: by name, bytes of a weight in the layout of its device. Of a node that has one of
            them, all that may cross (``dense_weights``) must be there.
        slots: number of buffers that the layers of a device take in turns.

    Raises:
        PykernelsError: a program that loads its dense weights already, or whose layers are not one
            behind the other.
    """
    layers: dict[tuple[str, int], _Layer] = {}
    for i, node in enumerate(program.nodes):
        names = [name for _, name in dense_weights(program, node) if name in sizes]
        if names and node.layer is not None:
            one = layers.setdefault(
                (node.device, node.layer), _Layer(i, i, node.device, node.layer)
            )
            one.last = i
            one.weights |= dict.fromkeys(names)
    before: dict[int, list[Node]] = {}  # by the number of the node in front of which they stand
    slot_of: dict[tuple[str, int], str] = {}
    buffers: dict[str, Buffer] = {}
    devices = dict.fromkeys(device for device, _ in layers)
    for device in devices:
        device_layers = [layer for layer in layers.values() if layer.device == device]
        label = "dense" if len(devices) == 1 else f"dense.{device}"
        nbytes = max(layer.nbytes(sizes) for layer in device_layers)
        for i, layer in enumerate(device_layers):
            at = 0 if i < slots else device_layers[i - slots].last + 1
            if at > layer.first:
                raise PykernelsError(
                    f"layers of {program.name!r} are not one behind the other", "Give more slots"
                )
            slot = f"{label}.slot{i % slots}"
            buffers[slot] = Buffer(slot, (nbytes,), torch.uint8)
            slot_of[device, layer.number] = slot
            before.setdefault(at, []).append(_load(layer, slot, i >= slots))
    nodes = list[Node]()
    for i, node in enumerate(program.nodes):
        nodes += before.get(i, [])
        buffer = slot_of.get((node.device, -1 if node.layer is None else node.layer))
        if buffer and any(name in sizes for _, name in dense_weights(program, node)):
            node = replace(node, inputs={**node.inputs, "streamed": buffer})
        nodes.append(node)
    return rebuilt(program, nodes, buffers)


def _load(layer: _Layer, slot: str, used: bool) -> Node:
    weights = {f"weight{i}": name for i, name in enumerate(layer.weights)}
    return Node(
        "load_weights",
        {"out": slot} if used else {},
        {"out": slot},
        MappingProxyType(weights),
        device=layer.device,
        name=f"layers.{layer.number}.load_weights",
        layer=layer.number,
        role="load",
    )
