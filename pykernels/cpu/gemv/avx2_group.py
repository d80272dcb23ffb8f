"""A group of inputs in AVX2: what a tile (``avx2``) does for each, whatever it multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The products of a group of inputs with M tokens.

    Attributes:
        add: ``add(outs, tile, first, side, k, near, LINES, scale, quarter, rows, K, tables)`` adds
            the products of inputs k to ``k + self.k``, the ``first``-th of a packed tile, times
            their scale to float32 ``outs`` [M, 4, 8] in memory; of ``sides`` sides (8 of the tile's
            16 outputs) from ``side`` on, which are the block's quarters from ``quarter`` on. It
            prefetches LINES lines from ``near`` on.
        k: inputs.
        sides: 1 or 2, as many as accumulators fit in registers.
        units: what else the sums are multiplied with, one after the other: together they might
            overflow.
    """

    add: Callable
    k: int
    sides: int
    units: tuple[float, ...]
