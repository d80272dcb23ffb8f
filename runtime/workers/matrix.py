"""How weights of linears are packed by all workers, and where they lie."""

from __future__ import annotations

import torch

from pykernels.cpu import make_pack, pack_job, packs_scales
from pykernels.quant import Format, Packer, Weight
from pykernels.quant.matrix import Allocate

from ..machine.memory import collapse
from ..machine.nodes import MemoryNodes
from .job import Job, Jobs
from .pool import WorkerPool

Pack = Packer
"""``Format.pack``, or on the workers of a pool: ``packer``."""


def packer(pool: WorkerPool) -> Pack:
    """``Format.pack`` on every worker: one task a 32-row block; then huge pages, where they are
    whole ones by now."""

    def pack(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        scale = None if weight.scale is None else weight.scale.contiguous()
        weight = Weight(weight.data.contiguous(), scale)
        record, tasks = pack_job(fmt, weight, blocks, scales)
        run = make_pack(fmt.name).address
        pool.run(Jobs([Job("pack", run, int(record.ctypes.data), tasks=tasks, after=0)]))
        if scale is not None and not packs_scales(fmt.name):
            fmt.pack_scales(scale, scales)
        collapse(blocks)

    return pack


def weights_on(nodes: MemoryNodes, heads: int | None = None) -> Allocate:
    """New memory, the slices of a matrix each on a node.

    Args:
        heads: of a matrix per head, which are not cut; None: 32-row blocks are not.
    """

    def allocate(fmt: Format, K: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        units, sizes = heads or blocks, (fmt.block_bytes(K), fmt.scale_bytes(K))
        weights, scales = (
            nodes.allocate_units(units, blocks // units * size).view(blocks, size) for size in sizes
        )
        return weights, scales

    return allocate
