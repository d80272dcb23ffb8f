"""What crosses from main memory in each step, as launches: copies of weights and of experts, and
the unpacking of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from pykernels.gpu.gemm.weights import Matrices
from pykernels.gpu.moe.experts import Experts
from pykernels.gpu.moe.from_tiles import ExpertTiles, copy_experts, unpack_tiles
from pykernels.gpu.moe.tiles.gather import gather_experts
from pykernels.quant import PackedExperts
from pykernels.quant.split import SplitExperts

from ....program.node import Node
from ....program.weight_spec import WeightSpec
from ..memory.buffers import Memory
from ..memory.weights import expert_format
from .dense import Launch

_ALIGN = 256
"""Bytes: stacks begin at multiples of it."""


def load_experts(m: Memory, node: Node) -> Launch:
    first, count = node.attr("first"), node.attr("count")
    runs, held = list(_runs(first, count, node.attr("without"))), m.whole_weight(node, "experts")
    slices = _slices(held, count, m.written(node, "out"))
    order = m.optional(node, "order")

    def launch() -> None:
        for part in slices:
            if order is not None:
                gather_experts(part.packed, order, first, part.tiles)
                continue
            for run in runs:
                copy_experts(part.packed, run, part.tiles, run.start - first)

    return launch


def _runs(first: int, count: int, without: tuple[int, ...]) -> Iterator[range]:
    """``count`` numbers from ``first`` on without some, as runs of neighbours."""
    start = first
    for end in (*sorted(without), first + count):
        if start < end:
            yield range(start, end)
        start = end + 1


def load_weights(m: Memory, node: Node) -> Launch:
    pairs = [(weight.memory, slot) for _, weight, slot in m.in_slot(node)]

    def launch() -> None:
        for memory, slot in pairs:
            slot.copy_(memory, non_blocking=True)

    return launch


def unpack_experts(m: Memory, node: Node) -> Launch:
    spec, first, count = m.program.weight(node, "experts"), node.attr("first"), node.attr("count")
    slices = _slices(m.whole_weight(node, "experts"), count, m.read(node, "tiles"))
    out = experts_within(spec, m.written(node, "out"))
    slots = torch.arange(first, first + count, dtype=torch.int32, device=m.device)

    def launch() -> None:
        for part in slices:
            unpack_tiles(part.tiles, out, slots, part.start)

    return launch


class _Slice(NamedTuple):
    """Experts on one NUMA node, room for a few of them, and their first intermediate row."""

    packed: PackedExperts
    tiles: ExpertTiles
    start: int


def _slices(held: PackedExperts | SplitExperts, count: int, memory: torch.Tensor) -> list[_Slice]:
    """One behind the other in ``memory``."""
    starts = [rows.start for rows in held.rows] if isinstance(held, SplitExperts) else [0]
    at, found = 0, list[_Slice]()
    for start, packed in zip(starts, held.slices, strict=True):
        sizes = packed.shape, packed.fmt, packed.down_fmt, count
        found.append(_Slice(packed, ExpertTiles.within(memory[at:], *sizes), start))
        at += ExpertTiles.bytes_needed(*sizes)
    return found


def experts_within(spec: WeightSpec, memory: torch.Tensor) -> Experts:
    """A layer's experts over the first bytes of ``memory``, uint8 [``resident_bytes`` or more]."""
    parts = _parts(_alike(spec))
    at, found = 0, list[torch.Tensor]()
    for part in parts:
        found.append(memory[at : at + part.nbytes].view(part.dtype).view(part.shape))
        at += _aligned(part.nbytes)
    return _made_of(_alike(spec), iter(found))


def resident_bytes(spec: WeightSpec) -> int:
    """Bytes of a layer's experts as the GPU's kernels read them."""
    return sum(_aligned(part.nbytes) for part in _parts(_alike(spec)))


def _alike(spec: WeightSpec) -> Experts:
    """Experts of that layout without memory."""
    assert spec.moe is not None
    E, H, I = spec.shape  # noqa: E741
    return Experts.empty(expert_format(spec), E, H, I, torch.device("meta"), spec.moe.spec)


def _parts(experts: Experts) -> list[torch.Tensor]:
    stacks = (experts.gate_up, experts.down)
    every = [part for stack in stacks for part in (stack.data, stack.scale)]
    every += [experts.gate_up_bias, experts.down_bias]
    return [part for part in every if part is not None]


def _made_of(alike: Experts, parts: Iterator[torch.Tensor]) -> Experts:
    def stack(own: Matrices) -> Matrices:
        return replace(own, data=next(parts), scale=None if own.scale is None else next(parts))

    made = replace(alike, gate_up=stack(alike.gate_up), down=stack(alike.down))
    if alike.gate_up_bias is None:
        return made
    return replace(made, gate_up_bias=next(parts), down_bias=next(parts))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
