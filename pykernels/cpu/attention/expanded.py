"""MLA over many queries: each page's latents become one head's keys and values, once for all rows.

Absorbed, a query pays ``2 L + R`` multiply-adds for each key and head, expanded ``nope + R + dv``,
and all queries of a step together ``L (nope + dv)`` for the expansion: cheaper from
``expand_from`` on. An item is one head and the sequence's tokens of the step, up to ``ROWS``; its
keys and values lie in the worker's scratch, a page at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from ...target import detect
from ..intrin.scalar import f32_from_bits
from ..jit import inlined, task
from ..vectors import make_vectors, width
from ..words import i64
from .args import ITEM_BYTES, PAGE, attention_at, item_at
from .expand import (
    MAX_M,
    expansion_offsets,
    make_by_strip,
    make_columns_of_head,
    make_key_place,
    make_latent_rows,
    make_value_place,
)
from .items import make_setup
from .layout import Layout
from .pages import gather_scales, make_columns
from .products import make_page_scores, make_page_sums, padded_rows
from .rows import make_begin, make_finish, seeing_rows, whole_blocks
from .softmax import LOG2E, make_softmax

ROWS = 512
"""Queries that share an expansion; their own sums stay in L3 meanwhile."""
_BLOCK = 96
"""Rows that meet a page together: their queries and sums lie in L2 beside its keys and values."""
_GAIN = 1.25
"""By how much fewer multiply-adds must be to pay for the weights' columns and worse locality."""
_ONE, _TWO_TO_60 = 0x3F80, 0x5D80  # bits of bfloat16


def expand_from(L: int, R: int, nope: int, dv: int) -> int:
    """Tokens of a sequence in one step from which its keys and values are expanded: more than any
    step has where that gains nothing, or the kernel cannot have heads of such sizes."""
    if (nope + R) % 16 or dv % 16:
        return 1 << 40
    gained = (2 * L + R) / _GAIN - (nope + R + dv)
    return max(9, int(L * (nope + dv) / gained) + 1) if gained > 0 else 1 << 40


@dataclass(frozen=True)
class Expanded:
    """MLA with keys and values expanded: an op on an ``ATTENTION`` record with ``KVH = NH``.

    What a call must own is known before anything is compiled.

    Args:
        L, R: numbers of a latent and of its rotated part; nope, dv: of a head's key without that
            part and of its value.
        coded: latents are E4M3.

    Raises:
        PykernelsError: a size that is no multiple of 16.

    Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.2.
    """

    L: int
    R: int
    nope: int
    dv: int
    coded: bool

    @functools.cached_property
    def layout(self) -> Layout:
        codes = self.nope if self.coded else 0
        return Layout(self.nope + self.R, self.dv, width(detect()), codes, ROWS)

    def scratch_bytes(self, row_bytes: int) -> int:
        """Scratch of one worker. ``row_bytes``: the longer input row, of ``W_UK`` or ``W_UV``."""
        return expansion_offsets(self.layout, self.L, self.nope)["rows"] + MAX_M * row_bytes

    @staticmethod
    def items(NH: int, T: int, S: int) -> int:
        """Longest work list of a step of at most T tokens of S sequences."""
        return NH * (T // ROWS + S)

    def compile(self) -> tuple[Any, Any]:
        """Its tasks, as ``AttentionKernel.setup, run``."""
        return make_setup(self.dv, ROWS), _make_run(self.layout, self.L, self.R, self.nope)


def _make_load_query(layout: Layout, L: int, R: int, nope: int) -> Any:
    V: Any = make_vectors(layout.N)
    VECTOR = 4 * layout.N

    @inlined
    def load_query(args, token, head, to):
        """Its two parts, times the scale of the scores."""
        scale = V.broadcast(f32_from_bits(types.uint32(args.scale)) * LOG2E)
        plain = args.q_nope + token * args.q_nope_stride + head * (4 * (nope + R))
        rotated = args.q + token * args.q_stride + head * (4 * (L + R)) + 4 * L
        for d in range(0, 4 * nope, VECTOR):
            V.store_f32(to + d, V.mul(V.load_f32(plain + d), scale))
        for d in range(0, 4 * R, VECTOR):
            V.store_f32(to + 4 * nope + d, V.mul(V.load_f32(rotated + d), scale))

    return load_query


def _make_expand_page(layout: Layout, L: int, R: int, nope: int) -> Any:
    """``expand_page(scratch, rows, stride, rope, rope_stride, count)``: keys and values of a head
    whose weights are in the scratch."""
    N, D_K, D_V, CODED = layout.N, layout.D_K, layout.D_V, layout.codes > 0
    at, more = layout.offsets, expansion_offsets(layout, L, nope)
    KEYS, VALUES, W_UK, W_UV = at["keys"], at["values"], more["w_uk"], more["w_uv"]
    COLUMNS, LATENTS = more["columns"], more["latents"]
    KEY_STRIP, VALUE_STRIP = N * layout.key_vectors, N * layout.value_vectors
    columns = make_columns(Layout(L, L, N), False, 0, L, CODED)
    rope_columns = make_columns(layout, False, nope, D_K, False)
    latent_rows = make_latent_rows(layout, L)
    keys_of = make_by_strip(N, layout.key_vectors, L)
    values_of = make_by_strip(N, layout.value_vectors, L)

    @inlined
    def expand_page(scratch, rows, stride, rope, rope_stride, count):
        columns(rows, stride, count, scratch + COLUMNS)
        rope_columns(rope, rope_stride, count, scratch + KEYS)
        for strip in range((count + KEY_STRIP - 1) // KEY_STRIP):
            b = scratch + COLUMNS + strip * (4 * KEY_STRIP * L)
            keys_of(scratch + W_UK, b, 0, nope, scratch + KEYS + strip * (4 * KEY_STRIP * D_K))
        padded = max(4, (count + 1) // 2 * 2)
        latent_rows(rows, stride, padded, scratch + LATENTS)
        for strip in range(D_V // VALUE_STRIP):
            b = scratch + W_UV + strip * (4 * VALUE_STRIP * L)
            to = scratch + VALUES + strip * (4 * VALUE_STRIP * PAGE)
            values_of(scratch + LATENTS, b, 0, padded, to)

    return expand_page


@functools.cache
def _make_run(layout: Layout, L: int, R: int, nope: int) -> Any:
    at, more = layout.offsets, expansion_offsets(layout, L, nope)
    S, TOTALS, M, ALPHA, LOWS, ENDS = (at[x] for x in ("s", "l", "m", "alpha", "lows", "ends"))
    K_SCALES, V_SCALES, CODED = at["key_scales"], at["value_scales"], layout.codes > 0
    W_UK, W_UV, ROWS_AT = more["w_uk"], more["w_uv"], more["rows"]
    unit = _TWO_TO_60 if CODED else _ONE
    uk = make_columns_of_head(nope, L, unit, make_key_place(L))
    uv = make_columns_of_head(L, layout.D_V, unit, make_value_place(layout, L))
    begin = make_begin(layout, _make_load_query(layout, L, R, nope))
    finish = make_finish(layout, np.float32(1.0))
    expand_page = _make_expand_page(layout, L, R, nope)
    page_scores, page_sums = make_page_scores(layout), make_page_sums(layout)
    softmax = make_softmax(layout.N, CODED)

    @task(f"attention-expanded-{L}-{nope}-{layout.name}")
    def run(address, index, worker):
        args = attention_at(address)
        item = item_at(args.items + index * ITEM_BYTES)
        scratch = args.scratch + worker * args.scratch_stride
        rows, lows, ends = item.tokens, scratch + LOWS, scratch + ENDS
        padded = padded_rows(rows)
        table = args.page_table + 8 * i64(args.sequence, item.token) * args.page_table_stride
        status = uk(args.w_uk, item.head, scratch + ROWS_AT, scratch + W_UK)
        status |= uv(args.w_uv, item.head, scratch + ROWS_AT, scratch + W_UV)
        begin(args, item, scratch)
        first, last = 0, 0
        for page in range(item.start, item.end, PAGE):
            count, number = min(PAGE, item.end - page), i64(table, page // PAGE)
            latents = args.k + number * args.page_bytes
            rope, rope_stride = latents + 2 * L, args.token_bytes
            if CODED:
                rope, rope_stride = args.rope + number * (2 * PAGE * R), 2 * R
                scales = 4 * PAGE * number
                gather_scales(args.k_scale + scales, 4, count, scratch + K_SCALES)
                gather_scales(args.v_scale + scales, 4, count, scratch + V_SCALES)
            first, last = seeing_rows(rows, 1, page, lows, ends, first, last)
            begins, stops = whole_blocks(first, last, 2, padded)
            expand_page(scratch, latents, args.token_bytes, rope, rope_stride, count)
            while begins < stops:
                end = begins + _BLOCK if stops - begins >= _BLOCK + 4 else stops
                page_scores(scratch, False, begins, end, latents, False)
                softmax(
                    begins,
                    end,
                    page,
                    scratch + S,
                    scratch + M,
                    scratch + TOTALS,
                    scratch + ALPHA,
                    lows,
                    ends,
                    scratch + V_SCALES,
                )
                page_sums(scratch, False, latents, 0, count, begins, end, latents, False)
                begins = end
        finish(args, item, scratch)
        return status

    return run
