"""Routing, experts that are on the GPU, and what crosses to it from main memory in each step, as
launches: copies of weights and of experts, and the unpacking of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pykernels.gpu.moe.experts import GpuExperts
from pykernels.gpu.moe.from_tiles import ExpertTiles, copy_experts, unpack_tiles
from pykernels.gpu.moe.fused_moe import down, gate_up
from pykernels.gpu.moe.fused_moe import moe_ffn as run_experts
from pykernels.gpu.moe.permute import sort_pairs
from pykernels.gpu.moe.place_routing import place_routing as place
from pykernels.gpu.moe.rank_experts import rank_experts as rank
from pykernels.gpu.moe.router import route
from pykernels.gpu.moe.router import router as choose
from pykernels.gpu.moe.shared_factor import shared_factor as factor
from pykernels.gpu.moe.split_routing import split_routing as split_by_weight
from pykernels.gpu.moe.tiles.gather import gather_experts
from pykernels.quant import PackedExperts
from pykernels.quant.split import SplitExperts
from pykernels.shapes import Routing, SortedPairs

from ....passes.gpu.metadata import ORDER
from ....program.node import Node
from ..memory.buffers import GpuBuffers
from ..memory.weights import experts_within
from .dense import Launch, void


def router(m: GpuBuffers, node: Node) -> Launch:
    logits = m.read(node, "logits")[:, : node.attr("experts")]  # [T, E]
    out = Routing(m.written(node, "ids"), m.written(node, "weights"))
    bias, factors = (m.optional_weight(node, port) for port in ("bias", "factors"))
    spec = node.attr("spec")
    if "pairs" in node.outputs:  # of one token: the choice and its order are one launch
        order = SortedPairs(*(m.written(node, port) for port in ORDER))
        return lambda: void(route(logits, spec, bias, None, factors, (out, order, None)))
    slot_mapping = m.optional(node, "slot_mapping")  # -1: padding takes no experts
    return lambda: void(choose(logits.contiguous(), spec, bias, slot_mapping, factors, out))


def shared_factor(m: GpuBuffers, node: Node) -> Launch:
    gate, slots = m.weight(node, "weight"), m.optional(node, "slot_mapping")
    x = m.read(node, "x")[:, : gate.shape[1]]
    out = Routing(m.written(node, "ids"), m.written(node, "weights"))
    order = None
    if "pairs" in node.outputs:
        order = SortedPairs(*(m.written(node, port) for port in ORDER))
    return lambda: void(factor(x, gate, out, order, slots))


def sort_routing(m: GpuBuffers, node: Node) -> Launch:
    ids, E = m.read(node, "ids"), node.attr("experts")
    order = SortedPairs(*(m.written(node, port) for port in ORDER))
    return lambda: void(sort_pairs(ids, E, order))


def split_routing(m: GpuBuffers, node: Node) -> Launch:
    ids, factors, last = m.read(node, "ids"), m.read(node, "weights"), node.attr("last")
    second = m.written(node, "last_ids") if "last_ids" in node.outputs else None
    outs, whole = (m.written(node, "first_ids"), second), m.optional(node, "whole")
    return lambda: void(split_by_weight(ids, factors, last, outs, whole))


def place_routing(m: GpuBuffers, node: Node) -> Launch:
    ids, slots = m.read(node, "ids"), m.read(node, "slots")
    out = m.written(node, "local_ids"), m.written(node, "remote_ids")
    return lambda: void(place(ids, slots, out))


def rank_experts(m: GpuBuffers, node: Node) -> Launch:
    ids, slots, order = m.read(node, "ids"), m.written(node, "slots"), m.written(node, "order")
    return lambda: void(rank(ids, len(slots), len(order), (slots, order)))


def moe_ffn(m: GpuBuffers, node: Node) -> Launch:
    x, out = m.read(node, "x"), m.written(node, "out")
    resident = m.optional(node, "resident")
    if resident is None:
        experts = m.weight(node, "experts")
    else:
        experts = experts_within(m.program.weight(node, "experts"), resident)
    ids, factors = m.optional(node, "ids"), m.optional(node, "weights")
    if ids is None or factors is None:
        return _one_expert(x, experts, out)
    expert_ids, expert_weights = ids, factors
    order = SortedPairs(*(m.read(node, port) for port in ORDER))
    return lambda: void(run_experts(x, expert_ids, expert_weights, experts, out=out, order=order))


def _one_expert(x: torch.Tensor, experts: GpuExperts, out: torch.Tensor) -> Launch:
    """All tokens in their own order, so there is nothing to sort, to weight or to sum."""
    pairs = torch.arange(len(x), dtype=torch.int32, device=x.device)
    starts = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
    order = SortedPairs(pairs, starts, pairs[:, None])

    def launch() -> None:
        y = down(gate_up(x, experts, order), experts, order, out=out if bf16 else None)
        if not bf16:
            out.copy_(y)

    bf16 = out.dtype == torch.bfloat16
    return launch


def load_experts(m: GpuBuffers, node: Node) -> Launch:
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


def load_weights(m: GpuBuffers, node: Node) -> Launch:
    pairs = [(weight.memory, slot) for _, weight, slot in m.in_slot(node)]

    def launch() -> None:
        for memory, slot in pairs:
            slot.copy_(memory, non_blocking=True)

    return launch


def unpack_experts(m: GpuBuffers, node: Node) -> Launch:
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
    at, made = 0, list[_Slice]()
    for start, packed in zip(starts, held.slices, strict=True):
        sizes = packed.shape, packed.fmt, packed.down_fmt, count
        made.append(_Slice(packed, ExpertTiles.within(memory[at:], *sizes), start))
        at += ExpertTiles.bytes_needed(*sizes)
    return made
