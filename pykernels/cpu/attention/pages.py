"""A page of the cache as the products read it: float32, in strips, keys as columns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..intrin.prefetch import prefetch_l2
from ..jit import inlined
from ..vectors import make_vectors
from ..words import f32, i64, poke_f32, poke_i64
from .args import PAGE
from .layout import Layout
from .transpose import make_transpose

UNIT = np.float32(2.0**60)
"""What queries, and scales, of E4M3 are multiplied by, and sums of its values: codes are read as
2**-120 of what they are, and scales of any size stay within float32 this way."""
_ZERO = np.float32(0.0)


@functools.cache
def make_keys(layout: Layout, few: bool) -> Any:
    """``keys(rows, stride, rope, count, to)``: ``count`` keys, ``stride`` bytes apart, as columns.

    float32 [strip][D_K][keys of a strip]; ``few``: pairs of bfloat16 [strip][D_K / 2][keys of a
    strip]. What is E4M3 is 2**-120 of its codes; of latents in E4M3 the rest of a key is in the
    dense rows at ``rope``. It moves N keys at a time, so up to N - 1 rows more.
    """
    D_K, CODES = layout.D_K, layout.codes
    first = make_columns(layout, few, 0, CODES or D_K, CODES > 0)
    if CODES in (0, D_K):

        @inlined
        def keys(rows, stride, rope, count, to):
            first(rows, stride, count, to)

        return keys
    rest = make_columns(layout, few, CODES, D_K, False)

    @inlined
    def keys_in_two(rows, stride, rope, count, to):
        first(rows, stride, count, to)
        rest(rope, 2 * (D_K - CODES), count, to)

    return keys_in_two


def make_columns(layout: Layout, few: bool, first: int, last: int, coded: bool) -> Any:
    """``columns(rows, stride, count, to)``: the numbers ``first`` to before ``last`` of keys, which
    begin at ``rows``."""
    N, D_K, C, SIZE = layout.N, layout.D_K, layout.key_vectors, 1 if coded else 2
    WIDE = (last - first) // (2 * N) * 2 * N  # the other 16 by vectors of half the length
    REST, COLUMN = last - first > WIDE, 4 * N * C
    NUMBER = COLUMN // 2 if few else COLUMN
    transpose, transpose_8 = (make_transpose(n, not few, coded) for n in (N, 8))

    @inlined
    def columns(rows, stride, count, to):
        for group in range((count + N - 1) // N):
            source = rows + N * group * stride
            place = to + group // C * (NUMBER * D_K) + group % C * 4 * N + NUMBER * first
            for d in range(0, WIDE, 2 * N):
                transpose(source + SIZE * d, stride, place + NUMBER * d, COLUMN)
            if REST:
                for half in range(0, N, 8):
                    at = source + half * stride + SIZE * WIDE
                    transpose_8(at, stride, place + NUMBER * WIDE + 4 * half, COLUMN)

    return columns


@functools.cache
def make_number(layout: Layout) -> Any:
    """``number(row, c)``: vector c of a strip of values in the cache's own form."""
    V: Any = make_vectors(layout.N)
    VECTOR, PAIRS = layout.N * layout.number_bytes, layout.interleaved
    if layout.codes:
        plain, even, odd = V.load_e4m3, V.load_e4m3_even, V.load_e4m3_odd
    else:
        plain, even, odd = V.load_bf16, V.load_bf16_even, V.load_bf16_odd

    @inlined
    def number(row, c):
        if PAIRS:
            at = row + 2 * VECTOR * (c // 2)
            return even(at) if c % 2 == 0 else odd(at)
        return plain(row + VECTOR * c)

    return number


@functools.cache
def make_widen_values(layout: Layout) -> Any:
    """``widen_values(rows, stride, count, to)``: ``count`` values to float32 [strip][PAGE][numbers
    of a strip]; E4M3 to 2**-120 of its codes."""
    V: Any = make_vectors(layout.N)
    N, D_V, C = layout.N, layout.D_V, layout.value_vectors
    ROW, SIZE, number = 4 * N * C, layout.number_bytes, make_number(layout)

    @inlined
    def widen_values(rows, stride, count, to):
        for key in range(count):
            row = rows + key * stride
            for strip in range(D_V // (N * C)):
                place = to + strip * (ROW * PAGE) + key * ROW
                for c in range(C):
                    V.store_f32(place + 4 * N * c, number(row, c))
                row += SIZE * N * C

    return widen_values


@functools.cache
def make_list_lines(LINES: int, spare: int) -> Any:
    """``list_lines(stride, to)``: offsets of the cache lines of a page's rows, LINES each, and
    ``spare`` times that of the first, for those who fetch on when all is fetched.

    The next page is fetched line by line between multiply-adds: all at once, it would stall them
    as if it were read.
    """

    @inlined
    def list_lines(stride, to):
        for key in range(PAGE):
            for line in range(LINES):
                poke_i64(to, key * LINES + line, key * stride + 64 * line)
        for i in range(spare):
            poke_i64(to, PAGE * LINES + i, 0)

    return list_lines


@inlined
def gather_scales(scales, stride, count, to):
    """Scales of a page's first ``count`` tokens, times 2**60, and zeros behind them."""
    for token in range(PAGE):
        scale = f32(scales + token * stride, 0) * UNIT if token < count else _ZERO
        poke_f32(to + 4 * token, scale)


@inlined
def fetch(base, lines, first, last):
    """Prefetches lines of a list."""
    for i in range(first, last):
        prefetch_l2(base + i64(lines, i))


@functools.cache
def make_store_row(layout: Layout) -> Any:
    """``store_row(o, factor, to)``: a row of sums times ``factor``, in their natural order."""
    V: Any = make_vectors(layout.N)
    N, D_V, PAIRS = layout.N, layout.D_V, layout.interleaved

    @inlined
    def store_row(o, factor, to):
        by = V.broadcast(factor)
        if PAIRS:
            for at in range(0, 4 * D_V, 8 * N):
                even, odd = V.load_f32(o + at), V.load_f32(o + at + 4 * N)
                V.store_interleaved(to + at, V.mul(even, by), V.mul(odd, by))
        else:
            for at in range(0, 4 * D_V, 4 * N):
                V.store_f32(to + at, V.mul(V.load_f32(o + at), by))

    return store_row
