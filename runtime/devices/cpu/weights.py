"""Weights in the CPU's layouts: matrices and experts in tiles, in their own format."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pykernels.quant import PackedExperts, get_format

from ...machine.memory import allocate
from ...matrix import PackedHeads, PackedMatrix
from ...node import Node
from ...program import Program
from ...weight_spec import WeightSpec
from ...weights import Expert, Layout, LayoutOf, Packed, WeightStore, naming

HERE = torch.device("cpu")


def layouts(program: Program) -> LayoutOf:
    """In which layout each node reads its weights."""

    def layout_of(node: Node, port: str) -> tuple[torch.device, Layout]:
        spec = program.weight(node, port)
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
    ready = None if spec.whole else store.ready(spec, packed.__name__)
    if ready is not None:
        assert not isinstance(ready, torch.Tensor)
        return ready
    if spec.kind == "experts":
        return _experts(spec, store)
    made = empty(spec)
    for i, weight in enumerate(store.matrices(spec)):
        made.pack(i, weight, store.pack)
    return made


def empty(spec: WeightSpec) -> PackedMatrix | PackedHeads:
    """Memory for a matrix, or for those of all heads."""
    fmt = get_format(spec.fmt)
    if spec.kind == "heads":
        G, N, K = spec.shape
        return PackedHeads(fmt, (G, N, K))
    return PackedMatrix(fmt, spec.shapes)


def experts_of(spec: WeightSpec, store: WeightStore) -> Iterator[Expert]:
    """The experts of a weight, in order; some of a layer's from the tiles of all of them, which are
    in main memory in any case: nothing is read twice."""
    if spec.whole is None:
        return store.experts(spec)
    tiles = store.get(spec.whole, HERE, packed)
    return ((tiles.unpack(e), tiles.biases(e)) for e in spec.chosen)


def _experts(spec: WeightSpec, store: WeightStore) -> PackedExperts:
    assert spec.moe is not None
    fmt, down_fmt = get_format(spec.fmt), get_format(spec.down_fmt)
    made = PackedExperts(spec.moe, fmt, allocate, store.pack, down_fmt)
    for e, (matrices, biases) in enumerate(experts_of(spec, store)):
        with naming(spec, e):
            made.pack(e, *matrices, biases=biases)
    return made
