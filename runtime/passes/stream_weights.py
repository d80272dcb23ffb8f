"""Stream-loading prefill (OSDI'26 3.1): experts that lie in main memory cross to a GPU while it
computes, layer by layer.

A step of many tokens takes nearly all experts, so all of a layer are loaded, whatever its router
will say, and the load need not wait for it. They come in pieces:

    load 0, load 1, .., (layer 0: unpack 0, load R, unpack 1, load R + 1, .., moe_ffn), (layer 1: ..

A piece lies in one of R buffers that pieces take in turns, until ``unpack_experts`` has brought it
into the layout that the GPU's kernels read; so a load waits for the unpacking of R pieces before,
and for nothing else: it runs in a stream of its own (``Op.stream``) beside the attention and the
experts of the layers in front. That order is the ordinary one of nodes that share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from pykernels.errors import PykernelsError

from ..experts.staged import staged_bytes
from ..program import Buffer, Node, Program
from ..weight_spec import WeightSpec
from .layers import moe_layers, rebuilt, refuse_deferred, refuse_streamed

PIECES = 8
"""Pieces of a layer's experts."""
HERE = "experts.here"
"""The buffer of the layer whose experts are computed."""


@dataclass(frozen=True)
class Ring:
    """The buffers that experts pass through.

    Attributes:
        pieces: of a layer's experts. buffers: that pieces take in turns, 2 at the least; one more
            than ``pieces``: a whole layer is loaded while another one is computed.
    """

    pieces: int = PIECES
    buffers: int = PIECES + 1


def stream_weights(
    program: Program,
    device: str,
    room: Callable[[WeightSpec], int],
    ring: Ring | None = None,
    layers: Collection[int] | None = None,
) -> Program:
    """The program with routed experts computed on ``device`` from streamed weights.

    Args:
        room: bytes of a layer's experts in the device's own layout.
        layers: whose experts are streamed; None: those of all.

    Raises:
        PykernelsError: no routed experts, deferred ones, or streamed already; a layer whose experts
            lie in slices, one a NUMA node.
    """
    refuse_deferred(program, "stream_weights")
    refuse_streamed(program, "stream_weights", "Apply it once")
    ring = ring or Ring()
    moved = {
        layer.experts.name: layer.experts
        for layer in moe_layers(program)
        if layers is None or layer.experts.layer in layers
    }
    if not moved:
        raise PykernelsError(f"{program.name!r} has no routed experts", "Use it as it is")
    specs = [program.weight(node, "experts") for node in moved.values()]
    if sliced := [spec.name for spec in specs if spec.cut is not None]:
        raise PykernelsError(
            f"{sliced[0]} is a slice on a NUMA node", "Apply stream_weights before split_over_nodes"
        )
    loads = _loads(program, list(moved.values()), device, ring)
    buffers = _buffers(loads, specs, room)
    nodes = [load.node for load in loads[: ring.buffers]]
    at = 0
    for node in program.nodes:
        if node.name not in moved:
            nodes.append(node)
            continue
        while at < len(loads) and loads[at].layer is node:
            nodes.append(_unpack(loads[at], first=at == 0))
            nodes += [load.node for load in loads[at + ring.buffers : at + ring.buffers + 1]]
            at += 1
        nodes.append(replace(node, device=device, inputs={**node.inputs, "resident": HERE}))
    return rebuilt(program, nodes, buffers)


@dataclass(frozen=True)
class _Load:
    """Piece ``number`` of a layer, and the node that loads it."""

    layer: Node
    spec: WeightSpec
    number: int
    node: Node

    @property
    def nbytes(self) -> int:
        return staged_bytes(self.spec, self.node.attr("count"))


def _loads(program: Program, layers: list[Node], device: str, ring: Ring) -> list[_Load]:
    """All pieces, in the order of the layers."""
    loads: list[_Load] = []
    for layer in layers:
        spec = program.weight(layer, "experts")
        E = spec.shape[0]
        step = -(-E // ring.pieces)
        for first in range(0, E, step):
            name = f"experts.tiles{len(loads) % ring.buffers}"
            again = {"out": name} if len(loads) >= ring.buffers else {}
            node = Node(
                "load_experts",
                again,
                {"out": name},
                MappingProxyType({"experts": spec.name}),
                MappingProxyType({"first": first, "count": min(step, E - first)}),
                device,
                f"{layer.name}.load{first // step}",
                layer.layer,
                "load",
            )
            loads.append(_Load(layer, spec, first // step, node))
    return loads


def _unpack(load: _Load, first: bool) -> Node:
    tiles = {"tiles": load.node.outputs["out"]}
    return replace(
        load.node,
        op="unpack_experts",
        inputs=tiles if first else {**tiles, "out": HERE},
        outputs={"out": HERE},
        name=f"{load.layer.name}.unpack{load.number}",
    )


def _buffers(
    loads: list[_Load], specs: list[WeightSpec], room: Callable[[WeightSpec], int]
) -> dict[str, Buffer]:
    """The ring's, each as large as the largest piece, and that of a whole layer."""
    largest = max(load.nbytes for load in loads)
    sizes = {load.node.outputs["out"]: largest for load in loads}
    sizes[HERE] = max(map(room, specs))
    return {name: Buffer(name, (nbytes,), torch.uint8) for name, nbytes in sizes.items()}
