"""A page by all rows of a tile that see some of it: blocks of 6 rows, and 4 where need be."""

from __future__ import annotations

import functools
from typing import Any

from ..jit import inlined
from .args import PAGE
from .layout import Layout
from .pages import fetch, make_keys, make_widen_values
from .tiles import make_scores, make_weighted

FEW = 16
"""Rows of a tile that multiply a page as it is: making float32 of it does not pay. (On Zen 5
16 rows gain 11-18 %, 32 rows 9 %; sharing ports with multiply-adds, widening would cost more.)"""


@inlined
def padded_rows(rows):
    """Rows of a tile, rounded up to what its blocks cover."""
    return (rows + 3) // 4 * 4 if rows <= FEW else (rows + 1) // 2 * 2


@inlined
def in_sixes(rows):
    """How many of an even number of rows, at least 4, lie in blocks of 6."""
    return rows - rows % 3 * 4


@functools.cache
def make_load_keys(layout: Layout) -> Any:
    """``load_keys(scratch, few, rows, stride, rope, count)``: ``count`` keys at ``rows``,
    ``stride`` bytes apart, to the scratch (see ``make_keys``)."""
    many, few_keys, KEYS = make_keys(layout, False), make_keys(layout, True), layout.offsets["keys"]

    @inlined
    def load_keys(scratch, few, rows, stride, rope, count):
        if few:
            few_keys(rows, stride, rope, count, scratch + KEYS)
        else:
            many(rows, stride, rope, count, scratch + KEYS)

    return load_keys


@functools.cache
def make_load_values(layout: Layout) -> Any:
    """``load_values(scratch, few, rows, stride, count)``: the same of values; a few rows read them
    where they are."""
    widen, VALUES = make_widen_values(layout), layout.offsets["values"]

    @inlined
    def load_values(scratch, few, rows, stride, count):
        if not few:
            widen(rows, stride, count, scratch + VALUES)

    return load_values


@functools.cache
def make_page_scores(layout: Layout) -> Any:
    """``page_scores(scratch, few, first, last, base, more)``: the scratch's keys by the tile's rows
    ``first`` to before ``last``. If there are ``more`` pages, the lines of the next one, from
    ``base`` on, are fetched meanwhile.
    """
    D_K, N = layout.D_K, layout.N
    STRIP, STEPS, TOTAL = N * layout.key_vectors, layout.fetch_steps, PAGE * layout.row_lines[0]
    at = layout.offsets
    Q, S, KEYS, LINES, SCALES = (at[x] for x in ("q", "s", "keys", "key_lines", "key_scales"))
    six, four = make_scores(layout, 6, False), make_scores(layout, 4, False)
    few_four = make_scores(layout, 4, True)

    @inlined
    def page_scores(scratch, few, first, last, base, more):
        lines, done = scratch + LINES, 0 if more else TOTAL
        sixes = 0 if few else in_sixes(last - first)
        for strip in range(PAGE // STRIP):
            keys = scratch + KEYS + strip * ((2 if few else 4) * STRIP * D_K)
            to, scales = scratch + S + strip * (4 * STRIP), scratch + SCALES + strip * (4 * STRIP)
            for row in range(first, first + sixes, 6):
                q, s = scratch + Q + row * (4 * D_K), to + row * (4 * PAGE)
                six(q, keys, scales, s, base, lines + 8 * done)
                done = min(done + D_K // STEPS, TOTAL)
            for row in range(first + sixes, last, 4):
                q, s = scratch + Q + row * (4 * D_K), to + row * (4 * PAGE)
                if few:
                    few_four(q, keys, scales, s, base, lines + 8 * done)
                else:
                    four(q, keys, scales, s, base, lines + 8 * done)
                done = min(done + D_K // STEPS, TOTAL)
        fetch(base, lines, done, TOTAL)

    return page_scores


@functools.cache
def make_page_sums(layout: Layout) -> Any:
    """``page_sums(scratch, few, rows, stride, count, first, last, base, more)``: numerators by the
    page's ``count`` values, added to the rows' sums; for ``few`` rows they lie at ``rows``."""
    D_V, N, C = layout.D_V, layout.N, layout.value_vectors
    STRIP, STEPS, TOTAL = N * C, layout.fetch_steps, PAGE * layout.row_lines[1]
    SIZE = layout.number_bytes
    at = layout.offsets
    P, ALPHA, SUMS, VALUES, LINES = (at[x] for x in ("s", "alpha", "o", "values", "value_lines"))
    six, four = make_weighted(layout, 6, False), make_weighted(layout, 4, False)
    few_four = make_weighted(layout, 4, True)

    @inlined
    def page_sums(scratch, few, rows, stride, count, first, last, base, more):
        lines, done = scratch + LINES, 0 if more else TOTAL
        sixes = 0 if few else in_sixes(last - first)
        for strip in range(D_V // STRIP):
            values = scratch + VALUES + strip * (4 * STRIP * PAGE)
            to = scratch + SUMS + strip * (4 * STRIP)
            for row in range(first, first + sixes, 6):
                p, alpha = scratch + P + row * (4 * PAGE), scratch + ALPHA + 4 * row
                o = to + row * (4 * D_V)
                six(p, values, 4 * STRIP, count, o, alpha, base, lines + 8 * done)
                done = min(done + count // STEPS, TOTAL)
            for row in range(first + sixes, last, 4):
                p, alpha = scratch + P + row * (4 * PAGE), scratch + ALPHA + 4 * row
                o = to + row * (4 * D_V)
                if few:
                    source = rows + strip * (SIZE * STRIP)
                    few_four(p, source, stride, count, o, alpha, base, lines + 8 * done)
                else:
                    four(p, values, 4 * STRIP, count, o, alpha, base, lines + 8 * done)
                done = min(done + count // STEPS, TOTAL)
        fetch(base, lines, done, TOTAL)

    return page_sums
