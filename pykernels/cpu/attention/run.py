"""One item: a tile's rows over its pages, then its rows' results or its part of a split."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from ..intrin.scalar import f32_from_bits
from ..jit import inlined, task
from ..job import f32, i64, poke_f32, poke_i64
from ..vectors import make_vectors
from .job import ITEM_BYTES, PAGE, attention_at, item_at
from .layout import Layout
from .pages import UNIT, fetch, gather_scales, make_list_lines, make_store_row
from .products import FEW, make_page_scores, make_page_sums, padded_rows
from .softmax import LOG2E, NO_KEY, make_exp2, make_softmax

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@functools.cache
def make_run(layout: Layout) -> Any:
    """Compiles ``run(job, item, worker)``."""
    V: Any = make_vectors(layout.N)
    N, D_K, D_V = layout.N, layout.D_K, layout.D_V
    VECTOR = 4 * N
    at = layout.offsets
    Q, SUMS, S, L, M, ALPHA = (at[part] for part in ("q", "o", "s", "l", "m", "alpha"))
    LOWS, ENDS, K_LINES, V_LINES = (at[x] for x in ("lows", "ends", "key_lines", "value_lines"))
    K_SCALES, V_SCALES, CODES = at["key_scales"], at["value_scales"], layout.codes
    K_LINE, V_LINE = layout.row_lines
    K_TOTAL, V_TOTAL, SUM = PAGE * K_LINE, PAGE * V_LINE, UNIT if CODES else _ONE
    ROPE = 2 * PAGE * (D_K - CODES)  # bytes of a page
    page_scores, page_sums = make_page_scores(layout), make_page_sums(layout)
    list_key_lines = make_list_lines(K_LINE, D_K)
    list_value_lines = make_list_lines(V_LINE, PAGE)
    softmax, exp2, store_row = make_softmax(N, CODES > 0), make_exp2(N), make_store_row(layout)

    @inlined
    def begin(job, item, scratch):
        """Queries, sums and limits of the tile's rows; rows of padding see no key."""
        factor = f32_from_bits(types.uint32(job.scale)) * LOG2E
        scale, coded = V.broadcast(factor), V.broadcast(factor * UNIT)
        rows = item.tokens * item.heads
        for token in range(item.tokens):
            position = i64(job.positions, item.token + token)
            low = max(0, position - job.window + 1) if job.window > 0 else 0
            source = job.q + (item.token + token) * job.q_stride + item.head * (4 * D_K)
            for head in range(item.heads):
                row = token * item.heads + head
                poke_i64(scratch + LOWS, row, low)
                poke_i64(scratch + ENDS, row, position + 1)
                for d in range(0, 4 * CODES, VECTOR):
                    x = V.mul(V.load_f32(source + head * (4 * D_K) + d), coded)
                    V.store_f32(scratch + Q + row * (4 * D_K) + d, x)
                for d in range(4 * CODES, 4 * D_K, VECTOR):
                    x = V.mul(V.load_f32(source + head * (4 * D_K) + d), scale)
                    V.store_f32(scratch + Q + row * (4 * D_K) + d, x)
        padded = padded_rows(rows)
        for row in range(rows, padded):
            poke_i64(scratch + LOWS, row, 0)
            poke_i64(scratch + ENDS, row, 0)
            for d in range(0, 4 * D_K, VECTOR):
                V.store_f32(scratch + Q + row * (4 * D_K) + d, V.zero())
        for row in range(padded):
            poke_f32(scratch + M + 4 * row, NO_KEY)
            V.store_f32(scratch + L + VECTOR * row, V.zero())
        for d in range(0, 4 * D_V * padded, VECTOR):
            V.store_f32(scratch + SUMS + d, V.zero())

    @inlined
    def finish(job, item, scratch):
        """To ``out``: sums over l, of which the sink has a share."""
        for token in range(item.tokens):
            for h in range(item.heads):
                row, head = token * item.heads + h, item.head + h
                total = V.sum(V.load_f32(scratch + L + VECTOR * row))
                factor = _ONE
                if job.sinks != 0:
                    sink, largest = f32(job.sinks, head) * LOG2E, f32(scratch + M, row)
                    now = max(sink, largest)
                    factor = V.first(exp2(V.broadcast(largest - now)))
                    total = total * factor + V.first(exp2(V.broadcast(sink - now)))
                to = job.out + (item.token + token) * job.out_stride + head * (4 * D_V)
                factor = factor * SUM / total if total > _ZERO else _ZERO
                store_row(scratch + SUMS + row * (4 * D_V), factor, to)

    @inlined
    def keep(item, scratch):
        """To the partial results: m, l, o."""
        padded = padded_rows(item.tokens * item.heads)
        for row in range(padded):
            poke_f32(item.partial + 4 * row, f32(scratch + M, row))
            total = V.sum(V.load_f32(scratch + L + VECTOR * row))
            poke_f32(item.partial + 4 * (padded + row), total)
        to = item.partial + 8 * padded
        for d in range(0, 4 * D_V * padded, VECTOR):
            V.store_f32(to + d, V.mul(V.load_f32(scratch + SUMS + d), V.broadcast(SUM)))

    @task(f"attention-{layout.name}")
    def run(address, index, worker):
        job = attention_at(address)
        item = item_at(job.items + index * ITEM_BYTES)
        scratch = job.scratch + worker * job.scratch_stride
        rows, heads = item.tokens * item.heads, item.heads
        padded, lows, ends = padded_rows(rows), scratch + LOWS, scratch + ENDS
        stride = job.token_bytes
        k = job.k + item.kv_head * job.k_head_bytes
        v = job.v + item.kv_head * job.v_head_bytes
        table = job.page_table + 8 * i64(job.sequence, item.token) * job.page_table_stride
        few = padded <= FEW
        unit = 4 if few else 2
        list_key_lines(stride, scratch + K_LINES)
        list_value_lines(stride, scratch + V_LINES)
        if item.start < item.end:
            place = i64(table, item.start // PAGE) * job.page_bytes
            fetch(k + place, scratch + K_LINES, 0, K_TOTAL)
            fetch(v + place, scratch + V_LINES, 0, V_TOTAL)
        begin(job, item, scratch)
        first, last = 0, 0  # rows that see some key of the page
        for page in range(item.start, item.end, PAGE):
            count = min(PAGE, item.end - page)
            number = i64(table, page // PAGE)
            place, rope = number * job.page_bytes, job.rope + number * ROPE
            if CODES:
                scales = 4 * (number * PAGE * job.KVH + item.kv_head)
                gather_scales(job.k_scale + scales, 4 * job.KVH, count, scratch + K_SCALES)
                gather_scales(job.v_scale + scales, 4 * job.KVH, count, scratch + V_SCALES)
            more = page + PAGE < item.end
            next_place = i64(table, page // PAGE + 1) * job.page_bytes if more else place
            while first < rows and i64(ends, first) <= page:
                first += heads
            while last < rows and i64(lows, last) < page + PAGE:
                last += heads
            # Whole blocks: of 4 rows, or of 6 and 4, which take any even number from 4.
            begins, stops = first // unit * unit, min((last + unit - 1) // unit * unit, padded)
            if stops - begins < 4:
                stops = min(begins + 4, padded)
                begins = stops - 4
            keys, values = k + place, v + place
            following = k + next_place
            page_scores(scratch, few, keys, stride, rope, count, begins, stops, following, more)
            softmax(
                begins,
                stops,
                page,
                scratch + S,
                scratch + M,
                scratch + L,
                scratch + ALPHA,
                lows,
                ends,
                scratch + V_SCALES,
            )
            page_sums(scratch, few, values, stride, count, begins, stops, v + next_place, more)
        if item.partial != 0:
            keep(item, scratch)
        else:
            finish(job, item, scratch)
        return 0

    return run
