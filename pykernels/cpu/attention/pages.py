"""A page of the cache as the products read it: float32, in strips, keys as columns."""

from __future__ import annotations

import functools
from typing import Any

from ..intrin.prefetch import prefetch_l2
from ..jit import inlined
from ..job import i64, poke_i64
from ..vectors import make_vectors
from .job import PAGE
from .layout import Layout
from .transpose import make_transpose


@functools.cache
def make_keys(layout: Layout, few: bool) -> Any:
    """``keys(rows, stride, count, to)``: ``count`` keys, ``stride`` bytes apart, as columns.

    float32 [strip][D_K][keys of a strip]; ``few``: pairs of bfloat16 [strip][D_K / 2][keys of a
    strip]. It moves N keys at a time, so up to N - 1 rows more.
    """
    N, D_K, C = layout.N, layout.D_K, layout.key_vectors
    WIDE = D_K // (2 * N) * 2 * N  # the rest, 16 of each key, by vectors of half the length
    COLUMN = 4 * N * C
    NUMBER = COLUMN // 2 if few else COLUMN
    transpose, transpose_8 = make_transpose(N, not few), make_transpose(8, not few)

    @inlined
    def keys(rows, stride, count, to):
        for group in range((count + N - 1) // N):
            source = rows + N * group * stride
            place = to + group // C * (NUMBER * D_K) + group % C * 4 * N
            for d in range(0, WIDE, 2 * N):
                transpose(source + 2 * d, stride, place + NUMBER * d, COLUMN)
            if WIDE < D_K:
                for half in range(0, N, 8):
                    at = source + half * stride + 2 * WIDE
                    transpose_8(at, stride, place + NUMBER * WIDE + 4 * half, COLUMN)

    return keys


@functools.cache
def make_widen_values(layout: Layout) -> Any:
    """``widen_values(rows, stride, count, to)``: ``count`` values to float32 [strip][PAGE][numbers
    of a strip]."""
    V: Any = make_vectors(layout.N)
    N, D_V, C, PAIRS = layout.N, layout.D_V, layout.value_vectors, layout.interleaved
    ROW = 4 * N * C

    @inlined
    def widen_values(rows, stride, count, to):
        for key in range(count):
            row = rows + key * stride
            for strip in range(D_V // (N * C)):
                place = to + strip * (ROW * PAGE) + key * ROW
                if PAIRS:
                    for c in range(0, C, 2):
                        V.store_f32(place + 4 * N * c, V.load_bf16_even(row + 2 * N * c))
                        V.store_f32(place + 4 * N * (c + 1), V.load_bf16_odd(row + 2 * N * c))
                else:
                    for c in range(C):
                        V.store_f32(place + 4 * N * c, V.load_bf16(row + 2 * N * c))
                row += 2 * N * C

    return widen_values


@functools.cache
def make_list_lines(D: int, spare: int) -> Any:
    """``list_lines(stride, to)``: offsets of the cache lines of a page's rows, and ``spare`` times
    that of the first, for those who fetch on when all is fetched.

    The next page is fetched line by line between multiply-adds: all at once, it would stall them
    as if it were read.
    """
    LINES = Layout.lines(D) // PAGE

    @inlined
    def list_lines(stride, to):
        for key in range(PAGE):
            for line in range(LINES):
                poke_i64(to, key * LINES + line, key * stride + 64 * line)
        for i in range(spare):
            poke_i64(to, PAGE * LINES + i, 0)

    return list_lines


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
