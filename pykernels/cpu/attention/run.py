"""One item: a tile's rows over its pages, then its rows' results or its part of a split."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from ..intrin.scalar import f32_from_bits
from ..jit import inlined, task
from ..vectors import make_vectors
from ..words import i64
from .args import ITEM_BYTES, PAGE, attention_at, item_at
from .layout import Layout
from .pages import UNIT, fetch, gather_scales, make_list_lines
from .products import (
    FEW,
    make_load_keys,
    make_load_values,
    make_page_scores,
    make_page_sums,
    padded_rows,
)
from .rows import make_begin, make_finish, make_keep, seeing_rows, whole_blocks
from .softmax import LOG2E, make_softmax


@functools.cache
def _make_load_query(layout: Layout) -> Any:
    V: Any = make_vectors(layout.N)
    VECTOR, D_K, CODES = 4 * layout.N, layout.D_K, layout.codes

    @inlined
    def load_query(args, token, head, to):
        """Times the scale of the scores, and of E4M3."""
        factor = f32_from_bits(types.uint32(args.scale)) * LOG2E
        scale, coded = V.broadcast(factor), V.broadcast(factor * UNIT)
        source = args.q + token * args.q_stride + head * (4 * D_K)
        for d in range(0, 4 * CODES, VECTOR):
            V.store_f32(to + d, V.mul(V.load_f32(source + d), coded))
        for d in range(4 * CODES, 4 * D_K, VECTOR):
            V.store_f32(to + d, V.mul(V.load_f32(source + d), scale))

    return load_query


@functools.cache
def make_run(layout: Layout) -> Any:
    """Compiles ``run(args, item, worker)``."""
    at, D_K, CODES = layout.offsets, layout.D_K, layout.codes
    S, L, M, ALPHA, LOWS, ENDS = (at[x] for x in ("s", "l", "m", "alpha", "lows", "ends"))
    K_LINES, V_LINES = at["key_lines"], at["value_lines"]
    K_SCALES, V_SCALES = at["key_scales"], at["value_scales"]
    K_LINE, V_LINE = layout.row_lines
    K_TOTAL, V_TOTAL = PAGE * K_LINE, PAGE * V_LINE
    ROPE = 2 * PAGE * (D_K - CODES)  # bytes of a page
    begin = make_begin(layout, _make_load_query(layout))
    unit_of_sums = UNIT if CODES else np.float32(1.0)
    finish, keep = make_finish(layout, unit_of_sums), make_keep(layout, unit_of_sums)
    load_keys, load_values = make_load_keys(layout), make_load_values(layout)
    page_scores, page_sums = make_page_scores(layout), make_page_sums(layout)
    list_key_lines = make_list_lines(K_LINE, D_K)
    list_value_lines = make_list_lines(V_LINE, PAGE)
    softmax = make_softmax(layout.N, CODES > 0)

    @task(f"attention-{layout.name}")
    def run(address, index, worker):
        args = attention_at(address)
        item = item_at(args.items + index * ITEM_BYTES)
        scratch = args.scratch + worker * args.scratch_stride
        rows, heads = item.tokens * item.heads, item.heads
        padded, lows, ends = padded_rows(rows), scratch + LOWS, scratch + ENDS
        stride = args.token_bytes
        k = args.k + item.kv_head * args.k_head_bytes
        v = args.v + item.kv_head * args.v_head_bytes
        table = args.page_table + 8 * i64(args.sequence, item.token) * args.page_table_stride
        few = padded <= FEW
        unit = 4 if few else 2
        list_key_lines(stride, scratch + K_LINES)
        list_value_lines(stride, scratch + V_LINES)
        if item.start < item.end:
            place = i64(table, item.start // PAGE) * args.page_bytes
            fetch(k + place, scratch + K_LINES, 0, K_TOTAL)
            fetch(v + place, scratch + V_LINES, 0, V_TOTAL)
        begin(args, item, scratch)
        first, last = 0, 0
        for page in range(item.start, item.end, PAGE):
            count = min(PAGE, item.end - page)
            number = i64(table, page // PAGE)
            place, rope = number * args.page_bytes, args.rope + number * ROPE
            if CODES:
                scales = 4 * (number * PAGE * args.KVH + item.kv_head)
                gather_scales(args.k_scale + scales, 4 * args.KVH, count, scratch + K_SCALES)
                gather_scales(args.v_scale + scales, 4 * args.KVH, count, scratch + V_SCALES)
            more = page + PAGE < item.end
            next_place = i64(table, page // PAGE + 1) * args.page_bytes if more else place
            first, last = seeing_rows(rows, heads, page, lows, ends, first, last)
            begins, stops = whole_blocks(first, last, unit, padded)
            keys, values = k + place, v + place
            load_keys(scratch, few, keys, stride, rope, count)
            page_scores(scratch, few, begins, stops, k + next_place, more)
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
            load_values(scratch, few, values, stride, count)
            page_sums(scratch, few, values, stride, count, begins, stops, v + next_place, more)
        if item.partial != 0:
            keep(item, scratch)
        else:
            finish(args, item, scratch)
        return 0

    return run
