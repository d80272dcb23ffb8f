"""Memory of a layer's experts: whole, or one slice on each NUMA node of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Format, PackedExperts, Packer, Weight
from pykernels.quant.split import Experts, SplitExperts, most_parts
from pykernels.shapes import MoEShape

from .. import matrix
from ..machine.memory import allocate
from ..workers.pool import Pool, WorkerPool, default_pool


def make_room(
    shape: MoEShape, fmt: Format, own: Pool | None, down_fmt: Format | None = None
) -> Experts:
    """Memory for the experts: split across the nodes of the pool, if it is on several.

    Raises:
        PykernelsError: no memory, or too narrow for the nodes that were asked for.
    """
    pool = own or default_pool()
    if isinstance(pool, WorkerPool):
        return PackedExperts(shape, fmt, allocate, packer(own), down_fmt)
    count = slices_on(shape, down_fmt or fmt, pool)
    allocs = [partial(allocate, node=each.node) for each in pool.pools[:count]]
    packers = [packer(own, i, count) for i in range(count)]
    return SplitExperts(shape, fmt, allocs, packers, down_fmt)


def slices_on(shape: MoEShape, fmt: Format, pool: Pool) -> int:
    """Into how many slices a layer is cut on a pool; ``fmt``: of down."""
    if isinstance(pool, WorkerPool) or not pool.narrow:
        return len(pool.pools)
    return min(len(pool.pools), most_parts(shape, fmt))


def workers_of(pool: Pool, slices: int) -> Sequence[WorkerPool]:
    """The pool of each slice.

    Raises:
        PykernelsError: fewer pools than slices.
    """
    if slices > len(pool.pools):
        raise PykernelsError(
            f"experts that were split across {slices} NUMA nodes cannot run on"
            f" {len(pool.pools)} pool(s)",
            "Configure threads and nodes before loading the model",
        )
    return pool.pools[:slices]


def packer(own: Pool | None, part: int = 0, slices: int = 1) -> Packer:
    """``matrix.packer`` of a slice's pool, which may be another one at each call."""

    def pack(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        pool = workers_of(own or default_pool(), slices)[part]
        matrix.packer(pool)(fmt, weight, blocks, scales)

    return pack
