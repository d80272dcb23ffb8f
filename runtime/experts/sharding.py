"""Memory of a layer's experts: whole, or one slice on each NUMA node (SOSP'25 section 3.3)."""

from __future__ import annotations

from functools import partial

import torch

from pykernels.quant import Format, PackedExperts, Packer, Weight
from pykernels.quant.split import Experts, SplitExperts, most_parts
from pykernels.shapes import MoEShape

from ..machine.memory import allocate
from ..machine.nodes import MemoryNodes
from ..workers import matrix
from ..workers.pool import WorkerPool, default_pool


def allocate_experts(
    shape: MoEShape, fmt: Format, down_fmt: Format, nodes: MemoryNodes, packer: Packer
) -> Experts:
    """Allocates memory for experts, a slice on each node; interleaved if they are not cut.

    Args:
        fmt: of gate and up; ``down_fmt``: of down.

    Raises:
        PykernelsError: no memory, or too narrow for the nodes that were asked for.
    """
    count = slices_on(shape, down_fmt, nodes)
    if count == 1:
        return PackedExperts(shape, fmt, nodes.allocate, packer, down_fmt)
    allocs = [partial(allocate, node=number) for number in nodes.numbers[:count]]
    return SplitExperts(shape, fmt, allocs, [packer] * count, down_fmt)


def shared_packer(own: WorkerPool | None) -> Packer:
    """``matrix.packer`` of a pool; None: of the shared one, which may be another at each call."""

    def pack(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        matrix.packer(own or default_pool())(fmt, weight, blocks, scales)

    return pack


def slices_on(shape: MoEShape, down_fmt: Format, nodes: MemoryNodes) -> int:
    """Number of slices into which the experts of a layer are cut."""
    return min(len(nodes), most_parts(shape, down_fmt)) if nodes.narrow else len(nodes)
