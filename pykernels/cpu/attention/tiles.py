"""The two products of a block of rows with one page: scores, and numerators times values."""

from __future__ import annotations

import functools
from typing import Any

from ..jit import inlined
from ..vectors import make_vectors
from .job import PAGE
from .layout import Layout

UNROLL = 4


@functools.cache
def make_scores(layout: Layout, R: int) -> Any:
    """``scores(q, keys, s)``: R rows of q by one strip of keys.

    q float32 [R, D_K]; keys float32 [D_K][keys of a strip]; s float32 [R, PAGE], at the strip.
    """
    V: Any = make_vectors(layout.N)
    D_K, C, BYTES, SUMS = layout.D_K, layout.key_vectors, 4 * layout.N, R * layout.key_vectors

    @inlined
    def scores(q, keys, s):
        sums = V.array(SUMS)
        for i in range(SUMS):
            sums[i] = V.zero()
        for _ in range(0, D_K, UNROLL):
            for u in range(UNROLL):
                k = V.array(C)
                for c in range(C):
                    k[c] = V.load_f32(keys + BYTES * (C * u + c))
                for r in range(R):
                    x = V.broadcast_at(q + 4 * D_K * r + 4 * u)
                    for c in range(C):
                        sums[C * r + c] = V.fma(x, k[c], sums[C * r + c])
            keys += BYTES * C * UNROLL
            q += 4 * UNROLL
        for r in range(R):
            for c in range(C):
                V.store_f32(s + 4 * PAGE * r + BYTES * c, sums[C * r + c])

    return scores


@functools.cache
def make_weighted(layout: Layout, R: int) -> Any:
    """``weighted(p, values, o, alpha, count)``: R rows' numerators by one strip of values.

    p float32 [R, PAGE]; values float32 [PAGE][numbers of a strip], of which the first ``count`` (a
    multiple of 4) are there; o float32 [R, D_V], at the strip: ``o alpha + p values``.
    """
    V: Any = make_vectors(layout.N)
    D_V, C, BYTES, SUMS = layout.D_V, layout.value_vectors, 4 * layout.N, R * layout.value_vectors

    @inlined
    def weighted(p, values, o, alpha, count):
        sums = V.array(SUMS)
        for r in range(R):
            factor = V.broadcast_at(alpha + 4 * r)
            for c in range(C):
                sums[C * r + c] = V.mul(factor, V.load_f32(o + 4 * D_V * r + BYTES * c))
        for _ in range(0, count, UNROLL):
            for u in range(UNROLL):
                v = V.array(C)
                for c in range(C):
                    v[c] = V.load_f32(values + BYTES * (C * u + c))
                for r in range(R):
                    x = V.broadcast_at(p + 4 * PAGE * r + 4 * u)
                    for c in range(C):
                        sums[C * r + c] = V.fma(x, v[c], sums[C * r + c])
            values += BYTES * C * UNROLL
            p += 4 * UNROLL
        for r in range(R):
            for c in range(C):
                V.store_f32(o + 4 * D_V * r + BYTES * c, sums[C * r + c])

    return weighted
