"""Stream-loading prefill (OSDI'26 3.1): experts that lie in main memory cross to a GPU while it
computes, layer by layer.

A step of many tokens takes nearly all experts, so all of a layer are loaded, whatever its router
will say, and the load need not wait for it. They come in chunks:

    load 0, load 1, .., (layer 0: unpack 0, load R, unpack 1, load R + 1, .., moe_ffn), (layer 1: ..

A chunk lies in one of R buffers that chunks take in turns, until ``unpack_experts`` has brought it
into the layout that the GPU's kernels read; so a load waits for the unpacking of R chunks before,
and for nothing else: it runs in a stream of its own (``Node.stream``) in parallel with the
attention and the experts of the layers in front. That order is the ordinary one of nodes that share
a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from pykernels.errors import PykernelsError

from ..experts.tiles import expert_tile_bytes
from ..machine.nodes import ONE_NODE, MemoryNodes
from ..program import Buffer, Node, Program
from ..program.weight_spec import WeightSpec
from .layers import moe_layers, rebuilt
from .order import ordered

CHUNKS = 8
"""Pieces of a layer's experts."""


@dataclass(frozen=True)
class StreamRing:
    """The buffers that experts pass through.

    Attributes:
        chunks: number into which a layer's experts are divided.
        buffers: number that the chunks take in turns, 2 at the least; one more than ``chunks``: a
            whole layer is loaded while another one is computed.
    """

    chunks: int = CHUNKS
    buffers: int = CHUNKS + 1


@ordered
def stream_weights(
    program: Program,
    resident_bytes: Callable[[WeightSpec], int],
    ring: StreamRing | None = None,
    layers: Collection[int] | None = None,
    nodes: MemoryNodes = ONE_NODE,
) -> Program:
    """The program with routed experts computed from streamed weights, each layer's on the device of
    its router.

    Args:
        resident_bytes: bytes of a layer's experts in the device's own layout.
        layers: whose experts are streamed; None: those of all.
        nodes: on each of them lies a slice of the experts.

    Raises:
        PykernelsError: no routed experts, deferred ones, or streamed already; a layer whose experts
            lie in slices, one a NUMA node.
    """
    moved = [
        layer.experts
        for layer in moe_layers(program)
        if layers is None or layer.experts.layer in layers
    ]
    if not moved:
        raise PykernelsError(f"{program.name!r} has no routed experts", "Use it as it is")
    return streamed(program, moved, resident_bytes, ring or StreamRing(), nodes)


def streamed(
    program: Program,
    moved: Sequence[Node],
    resident_bytes: Callable[[WeightSpec], int],
    ring: StreamRing,
    nodes: MemoryNodes,
    orders: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """The program with the experts of these nodes streamed: all of a layer, or of a
    ``WeightSpec.some`` those that a step ranks.

    Args:
        orders: by node, the buffer that says which; its loads follow what writes it. Other
            arguments: see ``stream_weights``.
    """
    devices: dict[str, list[Node]] = {}
    for node in moved:
        devices.setdefault(_router(program, node).device, []).append(node)
    ahead, streams = list[Node](), dict[str, list[Node]]()
    buffers: dict[str, Buffer] = {}
    for device, device_nodes in devices.items():
        label = "experts" if len(devices) == 1 else f"experts.{device}"
        stream = _Stream(program, device_nodes, device, ring, label, nodes, orders)
        ahead += stream.ahead
        streams |= stream.nodes()
        buffers |= stream.buffers(resident_bytes)
    whole = {
        spec.full.name: spec.full
        for node in moved
        if (spec := program.weight(node, "experts")).full is not None
    }
    program = replace(program, weights={**program.weights, **whole})
    every = [*ahead, *(new for node in program.nodes for new in streams.get(node.name, [node]))]
    return rebuilt(program, every, buffers)


def resident(program: Program, layer: int | None) -> frozenset[int]:
    """The experts of a layer that its device always has (``gpu_experts``): they need not cross, and
    no token takes them from among those that do."""
    specs = (
        program.weight(node, "experts")
        for node in program.nodes
        if node.role == "cached" and node.layer == layer and "resident" not in node.inputs
    )
    return frozenset(expert for spec in specs for expert in spec.expert_ids)


def _stored(spec: WeightSpec) -> tuple[WeightSpec, int]:
    """The spec of a layer's experts as main memory holds them, and the first one's number there:
    those of a rank are a run of the layer's."""
    if spec.full is None:
        return spec, 0
    assert spec.is_run
    return spec.full, spec.expert_ids[0]


def _router(program: Program, node: Node) -> Node:
    return program.writers[node.inputs["ids"]]


@dataclass(frozen=True)
class _Load:
    """Piece ``number`` of a layer, its first expert, and the node that loads it."""

    layer: Node
    spec: WeightSpec
    number: int
    first: int
    node: Node


class _Stream:
    """The experts that cross to one device.

    Args:
        layers: the nodes that compute them, in order.
        label: its buffers' names begin with it.
    """

    def __init__(
        self,
        program: Program,
        layers: list[Node],
        device: str,
        ring: StreamRing,
        label: str,
        nodes: MemoryNodes,
        orders: Mapping[str, str],
    ) -> None:
        self._layers, self._device, self._ring, self._nodes = layers, device, ring, nodes
        self._orders = orders
        self._label, self._resident = label, f"{label}.here"
        self._specs = {node.name: program.weight(node, "experts") for node in layers}
        self._resident_already = {
            node.name: frozenset() if orders else resident(program, node.layer) for node in layers
        }
        self._loads: list[_Load] = []
        for layer in layers:
            spec = self._specs[layer.name]
            E, of = spec.shape[0], (spec.full or spec).shape[0] if orders else spec.shape[0]
            step = -(-of // ring.chunks)
            for first in range(0, E, step):
                self._loads.append(self._load(layer, first, min(step, E - first), first // step))

    @property
    def ahead(self) -> list[Node]:
        """The loads that find a free buffer at the beginning."""
        return [] if self._orders else [load.node for load in self._loads[: self._ring.buffers]]

    def nodes(self) -> dict[str, list[Node]]:
        """The nodes that take the place of each node of a layer's experts, by its name."""
        by_node: dict[str, list[Node]] = {layer.name: [] for layer in self._layers}
        if self._orders:
            for layer in self._layers:
                by_node[layer.name] = self._one_layer(layer)
            return by_node
        for i, load in enumerate(self._loads):
            later = self._loads[i + self._ring.buffers :][:1]
            by_node[load.layer.name] += [
                self._unpack(load, i == 0),
                *(load_.node for load_ in later),
            ]
        for layer in self._layers:
            by_node[layer.name].append(self._computed(layer))
        return by_node

    def _one_layer(self, layer: Node) -> list[Node]:
        """A layer whose loads wait for its router."""
        loads, R = [load for load in self._loads if load.layer is layer], self._ring.buffers
        nodes = [load.node for load in loads[:R]]
        for i, load in enumerate(loads):
            nodes += [self._unpack(load, load is self._loads[0])]
            nodes += [later.node for later in loads[i + R :][:1]]
        return [*nodes, self._computed(layer)]

    def _computed(self, layer: Node) -> Node:
        inputs = {**layer.inputs, "resident": self._resident}
        return replace(layer, device=self._device, inputs=inputs)

    def buffers(self, resident_bytes: Callable[[WeightSpec], int]) -> dict[str, Buffer]:
        """The ring's, each as large as the largest chunk, and that of a whole layer."""
        largest = max(
            expert_tile_bytes(load.spec, load.node.attr("count"), self._nodes)
            for load in self._loads
        )
        sizes = {load.node.outputs["out"]: largest for load in self._loads}
        sizes[self._resident] = max(map(resident_bytes, self._specs.values()))
        return {name: Buffer(name, (nbytes,), torch.uint8) for name, nbytes in sizes.items()}

    def _load(self, layer: Node, first: int, count: int, number: int) -> _Load:
        turn, at = divmod(len(self._loads), self._ring.buffers)
        name, spec = f"{self._label}.tiles{at}", self._specs[layer.name]
        source, start = _stored(spec) if not self._orders else (spec, 0)
        order = {"order": self._orders[layer.name]} if self._orders else {}
        kept = tuple(
            sorted(self._resident_already[layer.name].intersection(range(first, first + count)))
        )
        node = Node(
            "load_experts",
            {"out": name, **order} if turn else order,
            {"out": name},
            MappingProxyType({"experts": source.name}),
            MappingProxyType({"first": start + first, "count": count, "without": kept}),
            self._device,
            f"{layer.name}.load{number}",
            layer.layer,
            "load",
        )
        return _Load(layer, spec, number, first, node)

    def _unpack(self, load: _Load, is_first: bool) -> Node:
        tiles = {"tiles": load.node.outputs["out"]}
        attrs = {**load.node.attrs, "first": load.first}
        return replace(
            load.node,
            op="unpack_experts",
            weights=MappingProxyType({"experts": load.spec.name}),
            attrs=MappingProxyType(attrs),
            inputs=tiles if is_first else {**tiles, "out": self._resident},
            outputs={"out": self._resident},
            name=f"{load.layer.name}.unpack{load.number}",
        )
