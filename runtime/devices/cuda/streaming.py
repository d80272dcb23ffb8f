"""Experts that are streamed to a GPU: pinned, and how fast the link brings them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from pykernels.gpu.moe.from_tiles import ExpertTiles, copy_experts
from pykernels.quant.split import Experts

from ...machine.pinned import Pinned
from ...planning.streaming import Streaming
from ...program import Program
from ...program.weights import WeightStore
from ..cpu import weights as cpu

_LINK_BYTES = 64 << 20
_ROUNDS = 3


def pin_experts(
    streaming: Streaming, program: Program, store: WeightStore, pinned: Pinned
) -> tuple[Streaming, str]:
    """Pins the experts that cross, layer by layer; the streaming of those that are, and why not all
    are, or "".

    Args:
        program: any of the model's, placed.
    """
    layers = set[int]()
    for node, spec in streaming.experts(program):
        held: Experts = store.get(spec, cpu.HERE, cpu.packed)
        for part in held.slices:
            if reason := pinned.add(part.arena):
                return replace(streaming, layers=frozenset(layers)), reason
        assert node.layer is not None
        layers.add(node.layer)
    return replace(streaming, layers=frozenset(layers)), ""


def link_rate(
    streaming: Streaming, program: Program, store: WeightStore, device: torch.device
) -> float:
    """Bytes a second from pinned experts to a GPU, while nothing else runs."""
    if device.type != "cuda":  # the interpreter reads main memory as it is
        return math.inf
    _, spec = next(streaming.experts(program))
    held: Experts = store.get(spec, cpu.HERE, cpu.packed)
    part = held.slices[0]
    count = min(part.shape.E, max(1, _LINK_BYTES // part.bytes_per_expert))
    tiles = ExpertTiles.empty(part.shape, part.fmt, part.down_fmt, count, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        copy_experts(part, range(count), tiles)  # the first one wakes the link
        begin.record()
        for _ in range(_ROUNDS):
            copy_experts(part, range(count), tiles)
        end.record()
        end.synchronize()
    return _ROUNDS * tiles.nbytes / max(1e-9, begin.elapsed_time(end) / 1e3)
