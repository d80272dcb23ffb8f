"""Sums a tile's splits, in their order, into rows of the output."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..jit import task
from ..vectors import make_vectors
from ..words import f32, poke_f32
from .args import COMBINE_BYTES, ITEM_BYTES, attention_at, combine_at, item_at
from .items import partial_bytes
from .layout import Layout
from .pages import make_store_row
from .products import padded_rows
from .softmax import LOG2E, NO_KEY, make_exp2

_ZERO = np.float32(0.0)


@functools.cache
def make_combine(layout: Layout) -> tuple[Any, Any]:
    """Compiles (setup, run): a task for each ``COMBINE_ROWS`` rows of a tile that was split."""
    V: Any = make_vectors(layout.N)
    N, D_V, C, exp2 = layout.N, layout.D_V, layout.value_vectors, make_exp2(layout.N)
    store_row = make_store_row(layout)
    WEIGHTS, SUMS = layout.offsets["q"], layout.offsets["o"]

    @task("attention-combine-setup")
    def setup(address, index, worker):
        return attention_at(address).combine_count

    @task(f"attention-combine-{layout.name}")
    def run(address, index, worker):
        args = attention_at(address)
        combine = combine_at(args.combines + index * COMBINE_BYTES)
        item = item_at(args.items + combine.item * ITEM_BYTES)
        scratch = args.scratch + worker * args.scratch_stride
        weights, sums = scratch + WEIGHTS, scratch + SUMS
        rows = item.tokens * item.heads
        padded, each = padded_rows(rows), partial_bytes(rows, D_V)
        for row in range(combine.row, combine.row + combine.rows):
            token, head = item.token + row // item.heads, item.head + row % item.heads
            largest = NO_KEY
            if args.sinks != 0:
                largest = f32(args.sinks, head) * LOG2E
            for split in range(combine.splits):
                largest = max(largest, f32(item.partial + split * each, row))
            total = _ZERO
            if args.sinks != 0:
                sink = f32(args.sinks, head) * LOG2E
                total = V.first(exp2(V.broadcast(sink - largest)))
            for split in range(combine.splits):
                at = item.partial + split * each
                weight = V.first(exp2(V.broadcast(f32(at, row) - largest)))
                poke_f32(weights + 4 * split, weight)
                total += weight * f32(at, padded + row)
            for strip in range(0, 4 * D_V, 4 * N * C):
                o = V.array(C)
                for c in range(C):
                    o[c] = V.zero()
                at = item.partial + 8 * padded + row * (4 * D_V) + strip
                for split in range(combine.splits):
                    weight = V.broadcast_at(weights + 4 * split)
                    for c in range(C):
                        o[c] = V.fma(weight, V.load_f32(at + split * each + 4 * N * c), o[c])
                for c in range(C):
                    V.store_f32(sums + strip + 4 * N * c, o[c])
            factor = np.float32(1.0) / total if total > _ZERO else _ZERO
            store_row(sums, factor, args.out + token * args.out_stride + head * (4 * D_V))
        return 0

    return setup, run
