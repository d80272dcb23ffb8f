"""Some experts of a layer in the CPU's tiles, in memory of any device: what is copied as it lies in
main memory, section by section, before it becomes the device's own layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from pykernels.quant import PackedExperts, get_format
from pykernels.quant.split import SplitExperts
from pykernels.shapes import MoEShape

from ..machine.nodes import ONE_NODE, MemoryNodes
from ..program.weight_spec import WeightSpec
from .sharding import slices_on


def expert_tile_bytes(spec: WeightSpec, count: int, nodes: MemoryNodes = ONE_NODE) -> int:
    """Bytes of so many of a layer's experts, each section aligned; on several NUMA nodes of all
    their slices."""
    assert spec.moe is not None
    fmt, down = get_format(spec.fmt), get_format(spec.down_fmt)
    parts = slices_on(spec.moe, down, nodes)
    return sum(SplitExperts.slice_bytes(_shape(spec, count), fmt, parts, down))


def expert_tiles(spec: WeightSpec, count: int, memory: torch.Tensor) -> PackedExperts:
    """So many of a layer's experts over the first bytes of ``memory``, uint8 [``expert_tile_bytes``
    or more]."""
    fmt, down = get_format(spec.fmt), get_format(spec.down_fmt)
    return PackedExperts(_shape(spec, count), fmt, lambda nbytes: memory[:nbytes], down_fmt=down)


def copy_experts(
    source: PackedExperts, first: int, count: int, target: PackedExperts, at: int = 0
) -> None:
    """Copies ``count`` experts from ``first`` on to ``at`` .. of ``target``: one run of bytes a
    section, asynchronous where one side is pinned and the other on a GPU."""
    for own, other in zip(source.sections, target.sections, strict=True):
        if own.numel():
            other[at : at + count].copy_(own[first : first + count], non_blocking=True)


def _shape(spec: WeightSpec, count: int) -> MoEShape:
    assert spec.moe is not None
    return replace(spec.moe, E=count, topk=min(spec.moe.topk, count))
