"""Experts that cross from main memory in each step, as launches: copies, and their unpacking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from pykernels.gpu.gemm.weights import Matrices
from pykernels.gpu.moe.experts import Experts
from pykernels.gpu.moe.from_tiles import ExpertTiles, copy_experts, unpack_tiles
from pykernels.quant import get_format

from ....node import Node
from ....weight_spec import WeightSpec
from ..memory import Memory
from ..weights import expert_format
from .dense import Launch

_ALIGN = 256
"""Bytes: stacks begin at multiples of it."""


def load_experts(m: Memory, node: Node) -> Launch:
    first, count = node.attr("first"), node.attr("count")
    packed, chosen = m.weight(node, "experts"), range(first, first + count)
    tiles = _tiles(m.program.weight(node, "experts"), count, m.written(node, "out"))
    return lambda: copy_experts(packed, chosen, tiles)


def unpack_experts(m: Memory, node: Node) -> Launch:
    spec, first, count = m.program.weight(node, "experts"), node.attr("first"), node.attr("count")
    tiles = _tiles(spec, count, m.read(node, "tiles"))
    out = experts_within(spec, m.written(node, "out"))
    slots = torch.arange(first, first + count, dtype=torch.int32, device=m.device)
    return lambda: unpack_tiles(tiles, out, slots)


def _tiles(spec: WeightSpec, count: int, memory: torch.Tensor) -> ExpertTiles:
    assert spec.moe is not None
    formats = get_format(spec.fmt), get_format(spec.down_fmt)
    return ExpertTiles.within(memory, spec.moe, *formats, count)


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

    gate_up, down = stack(alike.gate_up), stack(alike.down)
    biases = (
        {}
        if alike.gate_up_bias is None
        else {
            "gate_up_bias": next(parts),
            "down_bias": next(parts),
        }
    )
    return replace(alike, gate_up=gate_up, down=down, **biases)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
