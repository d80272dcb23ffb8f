"""Weights in the CPU's layouts: matrices and experts in tiles, in their own format."""

from __future__ import annotations

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, get_format
from pykernels.quant.split import Experts, SplitExperts

from ...experts.sharding import make_room
from ...machine.nodes import ONE_NODE, MemoryNodes
from ...matrix import PackedHeads, PackedMatrix, weights_on
from ...node import Node
from ...program import Program
from ...weight_spec import WeightSpec
from ...weights import Layout, LayoutOf, Packed, WeightStore, naming

HERE = torch.device("cpu")


def layouts(program: Program) -> LayoutOf:
    """In which layout each node reads its weights."""

    def layout_of(node: Node, port: str) -> tuple[torch.device, Layout]:
        spec = program.weight(node, port)
        if spec.cut is not None:
            return HERE, sliced
        if spec.kind == "tensor":
            return HERE, vector
        if port == "table" and spec.fmt == "bf16":
            return HERE, rows
        return HERE, packed

    return layout_of


def vector(spec: WeightSpec, store: WeightStore, device: torch.device) -> torch.Tensor:
    """A tensor, float32."""
    return store.tensor(spec).to(device)


def rows(spec: WeightSpec, store: WeightStore, device: torch.device) -> torch.Tensor:
    """A matrix whose rows are looked up, bfloat16 [N, K]."""
    if isinstance(ready := store.ready(spec, rows.__name__), torch.Tensor):
        return ready
    (weight,) = store.matrices(spec)
    return weight.data.contiguous().to(device)


def packed(spec: WeightSpec, store: WeightStore, device: torch.device) -> Packed:
    """In tiles: as it lies there already, or packed, one part after the other."""
    ready = store.ready(spec, packed.__name__)
    if ready is not None:
        assert not isinstance(ready, torch.Tensor | SplitExperts)
        return (
            ready if store.is_given(spec) or len(store.nodes) == 1 else _copied(ready, spec, store)
        )
    if spec.moe is not None:
        fmt, down_fmt = get_format(spec.fmt), get_format(spec.down_fmt)
        room = PackedExperts(spec.moe, fmt, store.nodes.allocate, store.pack, down_fmt)
        return _pack_experts(spec, store, room)
    made = empty(spec, store.nodes)
    for i, weight in enumerate(store.matrices(spec)):
        made.pack(i, weight, store.pack)
    return made


def sliced(spec: WeightSpec, store: WeightStore, device: torch.device) -> Packed | torch.Tensor:
    """A slice, in the memory of the whole."""
    assert spec.cut is not None
    whole, first, last = spec.cut.whole, spec.cut.first, spec.cut.last
    if spec.kind == "tensor":
        return store.get(whole, device, vector)[first:last]
    if spec.kind == "experts":
        parts = store.get(whole, device, slices).slices
        if len(parts) != last:
            raise PykernelsError(
                f"experts that were split across {len(parts)} NUMA nodes cannot run on {last}",
                "Load them for the nodes of the pool",
            )
        return parts[first]
    return store.get(whole, device, packed).some(first, last)


def slices(spec: WeightSpec, store: WeightStore, device: torch.device) -> Experts:
    """Experts in tiles, a slice on each NUMA node: packed so, or copied from where they lie."""
    ready = store.ready(spec, packed.__name__)
    if isinstance(ready, SplitExperts):
        return ready
    nodes = store.nodes
    assert spec.moe is not None and len(nodes) > 1, "weights are loaded for the pool's nodes"
    room = make_room(spec.moe, get_format(spec.fmt), get_format(spec.down_fmt), nodes, store.pack)
    if isinstance(ready, PackedExperts):
        assert isinstance(room, SplitExperts)
        room.take(ready)
        return room
    return _pack_experts(spec, store, room)


def empty(spec: WeightSpec, nodes: MemoryNodes = ONE_NODE) -> PackedMatrix | PackedHeads:
    """Memory for a matrix, or for those of all heads."""
    fmt = get_format(spec.fmt)
    if spec.kind == "heads":
        G, N, K = spec.shape
        return PackedHeads(fmt, (G, N, K), weights_on(nodes, G))
    return PackedMatrix(fmt, spec.shapes, weights_on(nodes))


def _copied(ready: Packed, spec: WeightSpec, store: WeightStore) -> Packed:
    """A weight of a mapped file, in memory of the NUMA nodes: a file's pages lie on the node whose
    thread read them first, and processes share them, so they cannot be bound to another."""
    if isinstance(ready, PackedExperts):
        made = PackedExperts(
            ready.shape, ready.fmt, store.nodes.allocate, store.pack, ready.down_fmt
        )
        made.arena.copy_(ready.arena)
        made.packed = list(ready.packed)
        return made
    assert isinstance(ready, PackedMatrix | PackedHeads)
    copy = empty(spec, store.nodes)
    copy.blocks.copy_(ready.blocks)
    copy.scales.copy_(ready.scales)
    return copy


def _pack_experts(spec: WeightSpec, store: WeightStore, room: Experts) -> Experts:
    for e, (matrices, biases) in enumerate(store.experts(spec)):
        with naming(spec, e):
            room.pack(e, *matrices, biases=biases)
    return room
