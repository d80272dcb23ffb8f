"""A superblock's minima as one more tile product (K-quants).

All weights of a group lie below ``factor * code`` by its minimum: it costs each token the sum of
the group's inputs times that, as many multiply-adds as half of those for scales. But minima are
integers of 6 bits under one float of their superblock, and sums, float32, are three bfloat16 that
add up to them exactly. So a superblock's is one product of 24 inputs, the three parts of 8 sums by
the 8 integers three times, with a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..activations.row_layout import sum_at
from ..intrin.avx512 import sub_f32, zero_f32
from ..intrin.avx512_bytes import broadcast_u8, store_u8
from ..intrin.avx512_words import bf16_pairs, load_f32_in_bf16_parts
from ..jit import inlined
from ..job import i64
from ..weights.scales import Scales
from .common import TILE

BYTES = 2 * TILE
"""Of the B tiles of a block's minima: one for each 16 outputs."""

_PARTS, _ROWS = 3, 16


def make_gather_minima(scales: Scales) -> Callable:
    """``gather(M, rows, K, first_k, a)``: the A tiles of a superblock's sums, a row a token."""
    GROUP = scales.k

    @inlined
    def gather(M, rows, K, first_k, a):
        for t in range(M):
            sums = sum_at(i64(rows, t), K, first_k // GROUP)
            store_u8(a + 64 * t, load_f32_in_bf16_parts(sums))

    return gather


def make_write_minima(scales: Scales) -> Callable:
    """``write(scale, first_k, b)``: the B tiles of a block's minima in a superblock, negated."""
    small_of: Any = scales.small_minimum
    GROUP, PAIRS = scales.k, scales.super_k // scales.k // 2

    @inlined
    def write(scale, first_k, b):
        for half in range(2):
            to = b + half * TILE
            for pair in range(PAIRS):
                group = first_k // GROUP + 2 * pair
                first, second = small_of(scale, group, half), small_of(scale, group + 1, half)
                row = bf16_pairs(sub_f32(zero_f32(), first), sub_f32(zero_f32(), second))
                for part in range(_PARTS):
                    store_u8(to + 64 * (PAIRS * part + pair), row)
            for row_of_zeros in range(_PARTS * PAIRS, _ROWS):
                store_u8(to + 64 * row_of_zeros, broadcast_u8(0))

    return write
