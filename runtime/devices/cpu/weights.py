"""Weights in the CPU's layouts: matrices and experts in tiles, in their own format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, PackedHeads, PackedMatrix, get_format
from pykernels.quant.split import Experts, SplitExperts

from ...experts.sharding import allocate_experts
from ...machine.memory import collapse
from ...machine.nodes import ONE_NODE, MemoryNodes
from ...program import Program
from ...program.node import Node
from ...program.weight_spec import WeightSpec
from ...program.weights import Expert, Layout, LayoutOf, Packed, WeightStore, naming
from ...workers.matrix import weights_on

CPU_DEVICE = torch.device("cpu")


def layouts(program: Program) -> LayoutOf:
    """The layout in which each node reads its weights."""

    def layout_of(node: Node, port: str) -> tuple[torch.device, Layout]:
        spec = program.weight(node, port)
        if spec.slice_of is not None:
            return CPU_DEVICE, sliced
        if spec.kind == "tensor":
            return CPU_DEVICE, vector
        if port == "table" and spec.fmt == "bf16":
            return CPU_DEVICE, rows
        return CPU_DEVICE, packed

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
    """A weight in tiles: taken as it is if it was stored so, else packed part by part; on several
    NUMA nodes a slice on each. Neighbouring experts of a layer lie in the memory of all of them."""
    if spec.full is not None and spec.is_run:
        first, last = spec.expert_ids[0], spec.expert_ids[-1] + 1
        return store.get(spec.full, device, packed).some(first, last)
    ready = None if spec.full else store.ready(spec, packed.__name__)
    assert not isinstance(ready, torch.Tensor)
    as_it_is = store.is_given(spec) or isinstance(ready, SplitExperts) or len(store.nodes) == 1
    if ready is not None and as_it_is:
        return ready
    if spec.moe is not None:
        assert not isinstance(ready, PackedMatrix | PackedHeads)
        return _experts(spec, store, ready)
    made = empty(spec, store.nodes)
    if isinstance(ready, PackedMatrix | PackedHeads):  # mapped, see _experts
        made.blocks.copy_(ready.blocks)
        made.scales.copy_(ready.scales)
        return made
    for i, weight in enumerate(store.matrices(spec)):
        made.pack(i, weight, store.pack)
    return made


def sliced(spec: WeightSpec, store: WeightStore, device: torch.device) -> Packed | torch.Tensor:
    """A slice, in the memory of the whole."""
    assert spec.slice_of is not None
    whole, first, last = spec.slice_of.full, spec.slice_of.first, spec.slice_of.last
    if spec.kind == "tensor":
        return store.get(whole, device, vector)[first:last]
    weight = store.get(whole, device, packed)
    if spec.kind != "experts":
        return weight.some(first, last)
    if len(weight.slices) != last:
        raise PykernelsError(
            f"{whole.name} was loaded in {len(weight.slices)} slices, the pool is on {last} nodes",
            "Load the model for the nodes of the pool",
        )
    return weight.slices[first]


def empty(spec: WeightSpec, nodes: MemoryNodes = ONE_NODE) -> PackedMatrix | PackedHeads:
    """Memory for a matrix, or for those of all heads."""
    fmt = get_format(spec.fmt)
    if spec.kind == "heads":
        G, N, K = spec.shape
        return PackedHeads(fmt, (G, N, K), weights_on(nodes, G))
    return PackedMatrix(fmt, spec.shapes, weights_on(nodes))


def experts_of(spec: WeightSpec, store: WeightStore) -> Iterator[Callable[[], Expert]]:
    """The experts of a weight, in order, each when it is called, by several threads if they like.

    Some of a layer's are unpacked from the tiles of all of them, which are in main memory in any
    case: nothing is read twice.
    """
    if spec.full is None:
        for expert in store.experts(spec):
            yield partial(_itself, expert)
        return
    tiles: Experts = store.get(spec.full, CPU_DEVICE, packed)
    for e in spec.expert_ids:
        yield partial(_unpacked, tiles, e)


def _itself(expert: Expert) -> Expert:
    return expert


def _unpacked(tiles: Experts, expert: int) -> Expert:
    return tiles.unpack(expert), tiles.biases(expert)


def _experts(spec: WeightSpec, store: WeightStore, mapped: Experts | None) -> Experts:
    """Experts, packed; or copied from a mapped file, whose pages lie on the node whose thread read
    them first: processes share them, so they cannot be bound to another."""
    assert spec.moe is not None
    formats = get_format(spec.fmt), get_format(spec.down_fmt)
    made = allocate_experts(spec.moe, *formats, store.nodes, store.pack)
    if mapped is not None:
        assert isinstance(mapped, PackedExperts)
        made.take(mapped)
        return made
    last: Expert | None = None
    for e, expert in enumerate(experts_of(spec, store)):
        matrices, biases = expert()
        if last is not None and matrices is last[0] and biases is last[1]:
            _repeat(made, e)
        else:
            with naming(spec, e):
                made.pack(e, *matrices, biases=biases)
        last = matrices, biases
    return made


def _repeat(made: Experts, expert: int) -> None:
    """Packs what the expert before has, which random models have in all of a layer: its tiles are
    copied, by NumPy, since threads of torch's would wait for each other on the workers' cores."""
    for part in made.slices:
        for section in part.sections:
            section[expert].numpy()[...] = section[expert - 1].numpy()
            collapse(section[expert])
        part.packed[expert] = True
