"""Minima of groups: what all their weights lie below ``factor * code``.

A group's costs each token the sum of its inputs times that. Minima that are any floats are what the
sums of products begin with (``make_begin_at_minima``), in multiply-adds of AVX-512: half as many as
scales take.

A superblock's minima (K-quants) are one more tile product. They are integers of 6 bits under one
float, and sums of inputs, float32, are three bfloat16 that add up to them exactly. So that is a
product of 24 inputs, the three parts of 8 sums by the 8 integers three times, with a scale of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..activations.row_layout import activation_scale, group_sum, sum_at
from ..intrin.avx512 import broadcast_f32, fnma_f32, store_f32, sub_f32, zero_f32
from ..intrin.avx512_bytes import broadcast_u8, store_u8
from ..intrin.avx512_words import bf16_pairs, load_f32_in_bf16_parts
from ..intrin.registers import f32x16_array
from ..jit import inlined
from ..weights.scales import Scales
from ..words import i64
from .common import TILE

BYTES = 2 * TILE
"""The B tiles of a block's minima take so many: one tile for each 16 outputs."""

_PARTS, _ROWS = 3, 16
_PASS = 8  # tokens whose sums stay in registers


def make_begin_at_minima(scales: Scales, ACT_K: int) -> Callable:
    """``begin(M, rows, K, scale, out)``: a block's sums of M tokens, float32 [M, 32], begin at what
    the minima of all K inputs take off; M is a multiple of 8.

    Args:
        ACT_K: inputs of an activation scale, 0 for none.
    """
    GROUP, N = scales.k, 2 * _PASS
    minimum_of: Any = scales.minimum

    @inlined
    def begin(M, rows, K, scale, out):
        for first in range(0, M, _PASS):
            totals = f32x16_array(N)
            for i in range(N):
                totals[i] = zero_f32()
            for group in range(K // GROUP):
                low, high = minimum_of(scale, group, 0), minimum_of(scale, group, 1)
                for t in range(_PASS):
                    row = i64(rows, first + t)
                    total = group_sum(row, K, group)
                    if ACT_K:
                        total *= activation_scale(row, K, group * GROUP, ACT_K)
                    x = broadcast_f32(total)
                    totals[2 * t] = fnma_f32(x, low, totals[2 * t])
                    totals[2 * t + 1] = fnma_f32(x, high, totals[2 * t + 1])
            for i in range(N):
                store_f32(out + 128 * first + 64 * i, totals[i])

    return begin


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
