"""AVX2 tiles of integer weights by int8 inputs, or by bf16 ones as int8 slices (``gemv.dot``).

``vpmaddubsw`` multiplies unsigned bytes by signed ones into sums of pairs, 16-bit words. Codes of 4
bits add up in words for a whole group of 32 inputs, and one ``vpmaddwd`` by ones makes integers of
them; wider codes do so at every load, 8-bit weights at every row, their signs moved to the input's
side first (``vpsignb``). AVX-VNNI's ``vpdpbusd`` adds up integers at once.

A group's sum is an exact integer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...quant.activations import SLICES
from ..activations.int8_slices import MAGIC_BITS, SHORT, make_joins
from ..activations.row_layout import (
    SUM_UNIT,
    RowFormat,
    codes_at,
    group_sum,
    offset_at,
    slices_at,
    sum_at,
    unit_sum,
)
from ..intrin import avx2
from ..intrin.avx2 import (
    abs_i8,
    add_i32,
    add_words,
    broadcast_f32,
    broadcast_i32,
    broadcast_i32_at,
    dot_u8i8,
    dot_words,
    dpbusd,
    fma_f32,
    fnma_f32,
    load_f32,
    sign_i8,
    store_f32,
    to_f32,
    zero_i32,
)
from ..intrin.prefetch import prefetch_l1
from ..intrin.registers import i32x8_array, pin_i32
from ..jit import inlined
from ..weights.codes_avx2 import Codes, make_codes
from ..words import i64
from .avx2_group import Group

_JOINS = make_joins(avx2, avx2)


def group_k(codes: Codes) -> int:
    """Inputs that are summed as integers: of a scale group, or a part of one."""
    return min(codes.k, 64 if codes.signed else 32)


def make_adds(codes: Codes, VNNI: bool) -> tuple[Callable, bool]:
    """``add(sum, even, odd, x)`` of a load's two rows by 8 inputs at x,
    and whether sums are words (else integers)."""
    WORDS = not VNNI and codes.largest * 256 * (group_k(codes) // 4) < 1 << 15
    SIGNED = codes.signed
    APART = SIGNED or codes.largest > 63  # the sum of two pairs may not fit in a word

    @inlined
    def pairs(row, x):
        if SIGNED:
            return dot_u8i8(abs_i8(row), sign_i8(x, row))
        return dot_u8i8(row, x)

    @inlined
    def products(even, odd, x):
        x0, x1 = broadcast_i32_at(x), broadcast_i32_at(x + 4)
        if APART:
            one = broadcast_i32(0x00010001)
            return add_i32(dot_words(pairs(even, x0), one), dot_words(pairs(odd, x1), one))
        words = add_words(pairs(even, x0), pairs(odd, x1))
        return words if WORDS else dot_words(words, broadcast_i32(0x00010001))

    @inlined
    def add(total, even, odd, x):
        if VNNI:
            x0, x1 = broadcast_i32_at(x), broadcast_i32_at(x + 4)
            if SIGNED:
                total = dpbusd(total, abs_i8(even), sign_i8(x0, even))
                return dpbusd(total, abs_i8(odd), sign_i8(x1, odd))
            return dpbusd(dpbusd(total, even, x0), odd, x1)
        if WORDS:
            return add_words(total, products(even, odd, x))
        return add_i32(total, products(even, odd, x))

    return add, WORDS


def make_group(fmt: str, how: RowFormat, M: int, KEPT: int, VNNI: bool) -> Group:
    """The group of M tokens.

    Args:
        KEPT: slices that are multiplied; 0 for int8 inputs.
        VNNI: whether the CPU has AVX-VNNI.
    """
    codes = make_codes(fmt)
    # What makes wider codes takes registers too.
    SIDES = 2 if 2 * M * max(1, KEPT) <= (8 if codes.largest <= 15 or codes.signed else 2) else 1
    GROUP, PIECE, BIAS = codes.k, group_k(codes), how.bias
    read, add_load, WORDS = codes.rows, *make_adds(codes, VNNI)
    factor_of: Any = codes.factors.factor
    minimum_of: Any = codes.factors.minimum
    MINIMA = minimum_of is not None
    LOADS, EACH = PIECE // 8, max(1, KEPT)
    SUMS = SIDES * M * EACH
    WHOLE = np.float32(SUM_UNIT / 256.0 ** (SLICES - KEPT))
    join_short, join_lowest = _JOINS

    @inlined
    def base(row, K, k, j):
        """What a sum of integers begins with."""
        if KEPT == 0:
            return broadcast_i32_at(sum_at(row, K, k // PIECE)) if BIAS else zero_i32()
        if BIAS:
            return broadcast_i32_at(offset_at(row, K, k // PIECE, j))
        return broadcast_i32(MAGIC_BITS) if j < SHORT else zero_i32()

    @inlined
    def integers(total, row, K, k, j):
        if WORDS:
            return add_i32(dot_words(total, broadcast_i32(0x00010001)), base(row, K, k, j))
        return total

    @inlined
    def joined(sums, i, row, K, k):
        if KEPT == 0:
            return to_f32(integers(sums[i], row, K, k, 0))
        value = join_short(
            integers(sums[i], row, K, k, 0),
            integers(sums[i + 1], row, K, k, 1),
            integers(sums[i + 2], row, K, k, 2),
        )
        if KEPT > SHORT:
            value = join_lowest(value, integers(sums[i + 3], row, K, k, 3))
        return value

    @inlined
    def input_at(row, K, k, j):
        return codes_at(row, K) + k if KEPT == 0 else slices_at(row, K, k, j)

    @inlined
    def add(outs, tile, first, side, k, near, LINES, scale, quarter, rows, K, tables):
        sums = i32x8_array(SUMS)
        for s in range(SIDES):
            for t in range(M):
                for j in range(EACH):
                    i = (s * M + t) * EACH + j
                    sums[i] = zero_i32() if WORDS else base(i64(rows, t), K, k, j)
        for at in range(LOADS):
            for line in range(at * LINES // LOADS, (at + 1) * LINES // LOADS):
                prefetch_l1(near + 64 * line)
            for s in range(SIDES):
                even, odd = read(tile, first // 8 + at, side + s, tables)
                for t in range(M):
                    for j in range(EACH):
                        x = input_at(i64(rows, t), K, k, j) + 8 * at
                        i = (s * M + t) * EACH + j
                        sums[i] = pin_i32(add_load(sums[i], even, odd, x))
        for s in range(SIDES):
            factor = factor_of(scale, k // GROUP, quarter + s)
            if MINIMA:
                minimum = minimum_of(scale, k // GROUP, quarter + s)
            for t in range(M):
                row, to = i64(rows, t), outs + 128 * t + 32 * (quarter + s)
                value = joined(sums, (s * M + t) * EACH, row, K, k)
                value = fma_f32(value, factor, load_f32(to))
                if MINIMA:
                    less = group_sum(row, K, k // PIECE)
                    if KEPT:
                        less = unit_sum(row, K, k // PIECE) * WHOLE
                    value = fnma_f32(broadcast_f32(less), minimum, value)
                store_f32(to, value)

    unit = codes.unit * (256.0 ** (SLICES - KEPT) if KEPT else 1)
    return Group(add, PIECE, SIDES, (unit,))
