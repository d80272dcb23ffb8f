"""One slab of a 32-row block by 16 or 32 tokens, on AMX tiles, added to float32 sums.

A C tile has no scale, so at the end of each scale group it is stored, scaled and added to the sums
by AVX-512. What this scale epilogue costs decides the shape of a pass: ``amx_wide`` for groups of
64 inputs and more, ``amx_narrow`` for groups that end with each tile product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .common import TILE

HEADER = 64
"""Bytes of scratch in front of the products."""
PARTS_BYTES = HEADER + 4 * TILE
"""Scratch of the passes: what the waiting products belong to, and these. (Not two buffers in turn:
4 KiB apart, a load would wait for a store to the other one, whose address looks the same.)"""


@dataclass(frozen=True)
class Passes:
    """The compiled loops over a slab.

    Attributes:
        run: ``run(inputs, count, a, a_group, b, c, scale, first_k, act_scales, minima, parts,
            ahead, stream, lines) -> ahead``: ``c[32, 32] += scale * (products of a slab)`` for
            ``count`` groups of 16 tokens, ``a_group`` bytes apart, less minima, whose A tiles are
            in ``minima`` and B tiles behind the slab (``amx_minima``); prefetches ``lines`` from
            ``ahead`` on with each product, and as many of each further stream, ``stream`` bytes
            apart; may leave the last of it to the next call.
        flush: ``flush(parts)``: adds what is left.
        token_groups: the most of ``count``.
        b_rows: rows of a B tile.
    """

    run: Any
    flush: Any
    token_groups: int
    b_rows: int
