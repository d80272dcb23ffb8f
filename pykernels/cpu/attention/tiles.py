"""The two products of a block of rows with one page: scores, and numerators times values.

Either meets float32 that was made for many rows, or, ``few``, what the cache has: then fewer bytes
go through L1 than rows could pay for.
"""

from __future__ import annotations

import functools
from typing import Any

from ..intrin.prefetch import prefetch_l2
from ..jit import inlined
from ..vectors import make_vectors
from ..words import i64
from .args import PAGE
from .layout import Layout
from .pages import make_number

UNROLL = 4


@functools.cache
def make_scores(layout: Layout, R: int, few: bool) -> Any:
    """``scores(q, keys, scales, s, base, lines)``: R rows of q by one strip of keys.

    q float32 [R, D_K]; keys float32 [D_K][keys of a strip], or pairs of bfloat16 [D_K / 2][keys of
    a strip]; scales float32 [keys of a strip], of E4M3 keys; s float32 [R, PAGE], at the strip.
    Meanwhile lines of a list from ``base`` on are fetched, one each ``fetch_steps``.
    """
    V: Any = make_vectors(layout.N)
    D_K, C, BYTES, SUMS = layout.D_K, layout.key_vectors, 4 * layout.N, R * layout.key_vectors
    CODES, STEP = layout.codes, BYTES * C // (2 if few else 1)
    FETCHES, EVERY = UNROLL // layout.fetch_steps, layout.fetch_steps

    @inlined
    def column(keys, u, c):
        if few:
            at = keys + BYTES * (C * (u // 2) + c)
            return V.load_bf16_even(at) if u % 2 == 0 else V.load_bf16_odd(at)
        return V.load_f32(keys + BYTES * (C * u + c))

    @inlined
    def add(sums, q, keys, numbers, base, lines):
        for _ in range(0, numbers, UNROLL):
            for u in range(UNROLL):
                if u % EVERY == 0:
                    prefetch_l2(base + i64(lines, u // EVERY))
                k = V.array(C)
                for c in range(C):
                    k[c] = column(keys, u, c)
                for r in range(R):
                    x = V.broadcast_at(q + 4 * D_K * r + 4 * u)
                    for c in range(C):
                        sums[C * r + c] = V.fma(x, k[c], sums[C * r + c])
            keys += STEP * UNROLL
            q += 4 * UNROLL
            lines += 8 * FETCHES

    @inlined
    def scores(q, keys, scales, s, base, lines):
        sums = V.array(SUMS)
        for i in range(SUMS):
            sums[i] = V.zero()
        if CODES:
            add(sums, q, keys, CODES, base, lines)
            for c in range(C):
                scale = V.load_f32(scales + BYTES * c)
                for r in range(R):
                    sums[C * r + c] = V.mul(sums[C * r + c], scale)
            lines += 8 * (CODES // EVERY)
        if CODES < D_K:
            add(sums, q + 4 * CODES, keys + STEP * CODES, D_K - CODES, base, lines)
        for r in range(R):
            for c in range(C):
                V.store_f32(s + 4 * PAGE * r + BYTES * c, sums[C * r + c])

    return scores


@functools.cache
def make_weighted(layout: Layout, R: int, few: bool) -> Any:
    """``weighted(p, values, stride, count, o, alpha, base, lines)``: ``o alpha + p values``, R rows
    of numerators by one strip of values.

    p float32 [R, PAGE]; ``count`` values, ``stride`` bytes apart, float32 or as the cache has
    them, at the strip; o float32 [R, D_V], at the strip. Lines are fetched as above.
    """
    V: Any = make_vectors(layout.N)
    D_V, C, BYTES, SUMS = layout.D_V, layout.value_vectors, 4 * layout.N, R * layout.value_vectors
    FETCHES, EVERY = UNROLL // layout.fetch_steps, layout.fetch_steps
    in_cache = make_number(layout)

    @inlined
    def number(row, c):
        return in_cache(row, c) if few else V.load_f32(row + BYTES * c)

    @inlined
    def one_key(sums, p, row):
        v = V.array(C)
        for c in range(C):
            v[c] = number(row, c)
        for r in range(R):
            x = V.broadcast_at(p + 4 * PAGE * r)
            for c in range(C):
                sums[C * r + c] = V.fma(x, v[c], sums[C * r + c])

    @inlined
    def weighted(p, values, stride, count, o, alpha, base, lines):
        sums = V.array(SUMS)
        for r in range(R):
            factor = V.broadcast_at(alpha + 4 * r)
            for c in range(C):
                sums[C * r + c] = V.mul(factor, V.load_f32(o + 4 * D_V * r + BYTES * c))
        for _ in range(count // UNROLL):
            for u in range(UNROLL):
                if u % EVERY == 0:
                    prefetch_l2(base + i64(lines, u // EVERY))
                one_key(sums, p + 4 * u, values + u * stride)
            values += UNROLL * stride
            p += 4 * UNROLL
            lines += 8 * FETCHES
        for _ in range(count % UNROLL):
            one_key(sums, p, values)
            values += stride
            p += 4
        for r in range(R):
            for c in range(C):
                V.store_f32(o + 4 * D_V * r + BYTES * c, sums[C * r + c])

    return weighted
