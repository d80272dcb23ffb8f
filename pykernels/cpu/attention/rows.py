"""A tile's rows: queries, sums and limits before the pages, and results behind them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..jit import inlined
from ..vectors import make_vectors
from ..words import f32, i64, poke_f32, poke_i64
from .args import PAGE
from .layout import Layout
from .pages import make_store_row
from .products import padded_rows
from .softmax import LOG2E, NO_KEY, make_exp2

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@functools.cache
def make_begin(layout: Layout, load_query: Any) -> Any:
    """``begin(args, item, scratch)``: queries by ``load_query(args, token, head, to)``, sums and
    limits of the tile's rows; rows of padding see no key."""
    V: Any = make_vectors(layout.N)
    N, D_K, D_V, at = layout.N, layout.D_K, layout.D_V, layout.offsets
    Q, SUMS, L, M, LOWS, ENDS = (at[part] for part in ("q", "o", "l", "m", "lows", "ends"))

    @inlined
    def begin(args, item, scratch):
        rows = item.tokens * item.heads
        for token in range(item.tokens):
            position = i64(args.positions, item.token + token)
            low = max(0, position - args.window + 1) if args.window > 0 else 0
            for head in range(item.heads):
                row = token * item.heads + head
                poke_i64(scratch + LOWS, row, low)
                poke_i64(scratch + ENDS, row, position + 1)
                to = scratch + Q + row * (4 * D_K)
                load_query(args, item.token + token, item.head + head, to)
        padded = padded_rows(rows)
        for row in range(rows, padded):
            poke_i64(scratch + LOWS, row, 0)
            poke_i64(scratch + ENDS, row, 0)
            for d in range(0, 4 * D_K, 4 * N):
                V.store_f32(scratch + Q + row * (4 * D_K) + d, V.zero())
        for row in range(padded):
            poke_f32(scratch + M + 4 * row, NO_KEY)
            V.store_f32(scratch + L + 4 * N * row, V.zero())
        for d in range(0, 4 * D_V * padded, 4 * N):
            V.store_f32(scratch + SUMS + d, V.zero())

    return begin


@functools.cache
def make_finish(layout: Layout, unit: np.float32) -> Any:
    """``finish(args, item, scratch)``: sums times ``unit`` over l, of which the sink has a share,
    to ``out``."""
    V: Any = make_vectors(layout.N)
    N, D_V, at = layout.N, layout.D_V, layout.offsets
    SUMS, L, M = at["o"], at["l"], at["m"]
    exp2, store_row = make_exp2(N), make_store_row(layout)

    @inlined
    def finish(args, item, scratch):
        for token in range(item.tokens):
            for h in range(item.heads):
                row, head = token * item.heads + h, item.head + h
                total = V.sum(V.load_f32(scratch + L + 4 * N * row))
                factor = _ONE
                if args.sinks != 0:
                    sink, largest = f32(args.sinks, head) * LOG2E, f32(scratch + M, row)
                    now = max(sink, largest)
                    factor = V.first(exp2(V.broadcast(largest - now)))
                    total = total * factor + V.first(exp2(V.broadcast(sink - now)))
                to = args.out + (item.token + token) * args.out_stride + head * (4 * D_V)
                factor = factor * unit / total if total > _ZERO else _ZERO
                store_row(scratch + SUMS + row * (4 * D_V), factor, to)

    return finish


@functools.cache
def make_keep(layout: Layout, unit: np.float32) -> Any:
    """``keep(item, scratch)``: m, l and sums times ``unit`` to the partial results."""
    V: Any = make_vectors(layout.N)
    N, D_V, at = layout.N, layout.D_V, layout.offsets
    SUMS, L, M = at["o"], at["l"], at["m"]

    @inlined
    def keep(item, scratch):
        padded = padded_rows(item.tokens * item.heads)
        for row in range(padded):
            poke_f32(item.partial + 4 * row, f32(scratch + M, row))
            total = V.sum(V.load_f32(scratch + L + 4 * N * row))
            poke_f32(item.partial + 4 * (padded + row), total)
        to = item.partial + 8 * padded
        for d in range(0, 4 * D_V * padded, 4 * N):
            V.store_f32(to + d, V.mul(V.load_f32(scratch + SUMS + d), V.broadcast(unit)))

    return keep


@inlined
def seeing_rows(rows, heads, page, lows, ends, first, last):
    """Finds the rows that see some key of a page, from those of the page before."""
    while first < rows and i64(ends, first) <= page:
        first += heads
    while last < rows and i64(lows, last) < page + PAGE:
        last += heads
    return first, last


@inlined
def whole_blocks(first, last, unit, padded):
    """As blocks cover them: of 4 rows, or of 6 and 4, which take any even number from 4."""
    begins, stops = first // unit * unit, min((last + unit - 1) // unit * unit, padded)
    if stops - begins < 4:
        stops = min(begins + 4, padded)
        begins = stops - 4
    return begins, stops
