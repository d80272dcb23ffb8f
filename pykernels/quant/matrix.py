"""Matrices of linears and of heads in the tile layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from .experts import Packer, aligned_zeros
from .format import Format, Weight
from .layout import N_BLOCK, padded


def pack_alone(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """``Format.pack``: on this thread."""
    fmt.pack(weight, blocks, scales)


Allocate = Callable[[Format, int, int], tuple[torch.Tensor, torch.Tensor]]
"""(format, K, number of 32-row blocks) -> where its blocks and scales go: uint8 [blocks, bytes],
at 64-byte-aligned addresses."""


def allocate_weights(fmt: Format, K: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An ``Allocate`` in new memory."""
    weights, scales = (
        aligned_zeros(blocks * size).view(blocks, size)
        for size in (fmt.block_bytes(K), fmt.scale_bytes(K))
    )
    return weights, scales


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
    def of(
        cls,
        fmt: Format,
        parts: Sequence[Weight],
        pack: Packer = pack_alone,
        allocate: Allocate = allocate_weights,
    ) -> PackedMatrix:
        """From matrices in ``fmt``."""
        packed = cls(fmt, [fmt.logical_shape(part) for part in parts], allocate)
        for i, part in enumerate(parts):
            packed.pack(i, part, pack)
        return packed

    def pack(self, part: int, weight: Weight, pack: Packer) -> None:
        """Packs one of the matrices."""
        first = self.starts[part] // N_BLOCK
        at = slice(first, first + self._counts[part])
        pack(self.fmt, weight, self.blocks[at], self.scales[at])

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return self.blocks.nbytes + self.scales.nbytes

    def some(self, first: int, last: int) -> PackedMatrix:
        """Its 32-row blocks ``first .. last - 1`` as a matrix, in the same memory."""
        found = copy.copy(self)
        found.blocks, found.scales = self.blocks[first:last], self.scales[first:last]
        found.N = min(N_BLOCK * last, self.N) - N_BLOCK * first
        found.starts, found.shapes = (0,), ((found.N, self.K),)
        return found

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
    def of(cls, fmt: Format, heads: Sequence[Weight], pack: Packer = pack_alone) -> PackedHeads:
        """From matrices in ``fmt``."""
        packed = cls(fmt, (len(heads), *fmt.logical_shape(heads[0])))
        for head, weight in enumerate(heads):
            packed.pack(head, weight, pack)
        return packed

    def pack(self, head: int, weight: Weight, pack: Packer) -> None:
        """Packs the matrix of one head."""
        pack(self.fmt, weight, self.blocks[head], self.scales[head])

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return self.blocks.nbytes + self.scales.nbytes

    def some(self, first: int, last: int) -> PackedHeads:
        """Its heads ``first .. last - 1``, in the same memory."""
        found = copy.copy(self)
        found.G = last - first
        found.blocks, found.scales = self.blocks[first:last], self.scales[first:last]
        return found

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, N, K)."""
        return self.G, self.N, self.K

    def __str__(self) -> str:
        return f"{self.fmt.name} [{self.G}, {self.N}, {self.K}]"
