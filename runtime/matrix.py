"""Weights of linears, packed in the tile layout, as programs hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pykernels.cpu import make_pack, pack_job, packs_scales
from pykernels.quant import Format, Weight
from pykernels.quant.layout import N_BLOCK, padded

from .machine.memory import allocate, collapse
from .workers.job import Job, Jobs
from .workers.pool import WorkerPool

Pack = Callable[[Format, Weight, torch.Tensor, torch.Tensor], None]
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


def pack_alone(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """``Format.pack``: on this thread."""
    fmt.pack(weight, blocks, scales)


Allocate = Callable[[Format, int, int], tuple[torch.Tensor, torch.Tensor]]
"""(format, K, number of 32-row blocks) -> where its blocks and scales go: uint8 [blocks, bytes]."""


def allocate_weights(fmt: Format, K: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An ``Allocate`` in new memory."""
    sizes = blocks * fmt.block_bytes(K), blocks * fmt.scale_bytes(K)
    weights = allocate(sizes[0]).view(blocks, -1)
    if not sizes[1]:
        return weights, torch.zeros(blocks, 0, dtype=torch.uint8, device="cpu")
    return weights, allocate(sizes[1]).view(blocks, -1)


class PackedMatrix:
    """One matrix, or several with the same K stacked along N; each starts at a 32-row block.

    Args:
        shapes: [N, K] of each.
        allocate: gives the memory, which ``pack`` fills.

    Attributes:
        blocks: uint8 [blocks, block bytes].
        scales: uint8 [blocks, scale bytes].
        N: rows, including those that pad a part's last block.
        starts: first row of each part.
    """

    def __init__(
        self,
        fmt: Format,
        shapes: Sequence[tuple[int, int]],
        allocate: Allocate = allocate_weights,
    ) -> None:
        self.fmt, self.shapes = fmt, tuple(shapes)
        self.K = shapes[0][1]
        assert all(K == self.K for _, K in shapes), "parts of one matrix read the same inputs"
        self._counts = [padded(N, 1)[0] // N_BLOCK for N, _ in shapes]
        self.starts = tuple(N_BLOCK * sum(self._counts[:i]) for i in range(len(shapes)))
        self.N = self.starts[-1] + shapes[-1][0]
        self.blocks, self.scales = allocate(fmt, self.K, sum(self._counts))

    @classmethod
    def of(cls, fmt: Format, parts: Sequence[Weight], pack: Pack = pack_alone) -> PackedMatrix:
        """From matrices in ``fmt``."""
        packed = cls(fmt, [fmt.logical_shape(part) for part in parts])
        for i, part in enumerate(parts):
            packed.pack(i, part, pack)
        return packed

    def pack(self, part: int, weight: Weight, pack: Pack) -> None:
        """Packs one of the matrices."""
        first = self.starts[part] // N_BLOCK
        at = slice(first, first + self._counts[part])
        pack(self.fmt, weight, self.blocks[at], self.scales[at])

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return self.blocks.nbytes + self.scales.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.N, self.K

    def __str__(self) -> str:
        return f"{self.fmt.name} [{self.N}, {self.K}]"


class PackedHeads:
    """A matrix [N, K] of each of ``G`` heads.

    Args:
        shape: (G, N, K).
        allocate: gives the memory, which ``pack`` fills.

    Attributes:
        blocks: uint8 [heads, blocks, block bytes].
        scales: uint8 [heads, blocks, scale bytes].
    """

    def __init__(
        self, fmt: Format, shape: tuple[int, int, int], allocate: Allocate = allocate_weights
    ) -> None:
        self.fmt = fmt
        self.G, self.N, self.K = shape
        count = padded(self.N, 1)[0] // N_BLOCK
        blocks, scales = allocate(fmt, self.K, self.G * count)
        self.blocks = blocks.view(self.G, count, -1)
        self.scales = scales.view(self.G, count, -1)

    @classmethod
    def of(cls, fmt: Format, heads: Sequence[Weight], pack: Pack = pack_alone) -> PackedHeads:
        """From matrices in ``fmt``."""
        packed = cls(fmt, (len(heads), *fmt.logical_shape(heads[0])))
        for head, weight in enumerate(heads):
            packed.pack(head, weight, pack)
        return packed

    def pack(self, head: int, weight: Weight, pack: Pack) -> None:
        """Packs the matrix of one head."""
        pack(self.fmt, weight, self.blocks[head], self.scales[head])

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return self.blocks.nbytes + self.scales.nbytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, N, K)."""
        return self.G, self.N, self.K

    def __str__(self) -> str:
        return f"{self.fmt.name} [{self.G}, {self.N}, {self.K}]"
