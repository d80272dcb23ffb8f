"""Online softmax of a page's scores, in powers of two: log2 e is in the queries' scale."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..jit import inlined
from ..vectors import make_vectors
from ..words import f32, i64, poke_f32
from .args import PAGE

LOG2E = np.float32(1.44269504088896341)
NO_KEY = np.float32(-1e30)
"""m of a row that has seen no key."""
MASKED = np.float32(-3e38)
"""The score of a key that a row does not see: far below ``NO_KEY`` too."""

_ONE = np.float32(1.0)
_LOWEST = np.float32(-126.0)  # 2**x of less counts as 0
_P1, _P2, _P3, _P4, _P5, _P6 = (
    np.float32(c)
    for c in (
        6.931472028550421e-1,
        2.402264791363012e-1,
        5.550332471162809e-2,
        9.618437357674640e-3,
        1.339887440266574e-3,
        1.535336188319500e-4,
    )
)


@functools.cache
def make_exp2(N: int) -> Any:
    """``exp2(x)``: 2**x of N floats that are at most 0, within 2 ulp; 0 below 2**-126.

    ``2**n * 2**f`` with ``|f| <= 1/2`` by the polynomial of Cephes' ``exp2f``; x - n is exact.
    """
    V = make_vectors(N)

    @inlined
    def exp2(x):
        n = V.round(x)
        f = V.sub(x, n)
        p = V.fma(V.broadcast(_P6), f, V.broadcast(_P5))
        p = V.fma(p, f, V.broadcast(_P4))
        p = V.fma(p, f, V.broadcast(_P3))
        p = V.fma(p, f, V.broadcast(_P2))
        p = V.fma(p, f, V.broadcast(_P1))
        p = V.fma(p, f, V.broadcast(_ONE))
        return V.where_less(x, V.broadcast(_LOWEST), V.zero(), V.scale_exp2(p, n))

    return exp2


@functools.cache
def make_softmax(N: int, scaled: bool) -> Any:
    """``softmax(first, last, page, s, m_i, l_i, alpha, lows, ends, scales)``: scores become
    numerators, ``scaled`` times ``scales`` float32 [PAGE], those of the values.

    Of rows ``first`` to before ``last``; ``page`` is its first key. ``s`` float32 [rows, PAGE];
    ``m_i`` float32 [rows], the largest score so far; ``l_i`` float32 [rows, N], sums of numerators
    by lane; ``alpha`` float32 [rows], what sums of earlier pages are to be multiplied by;
    ``lows, ends`` int64 [rows], the first key that a row sees, and the one behind its last.
    """
    V: Any = make_vectors(N)
    PARTS, BYTES, exp2 = PAGE // N, 4 * N, make_exp2(N)

    @inlined
    def softmax(first, last, page, s, m_i, l_i, alpha, lows, ends, scales):
        for row in range(first, last):
            at = s + 4 * PAGE * row
            x = V.array(PARTS)
            for i in range(PARTS):
                x[i] = V.load_f32(at + BYTES * i)
            low, end = i64(lows, row) - page, i64(ends, row) - page
            if low > 0 or end < PAGE:
                low, end = min(low, PAGE), max(end, 0)
                for i in range(PARTS):
                    x[i] = V.keep_lanes(x[i], low - N * i, end - N * i, V.broadcast(MASKED))
            top = x[0]
            for i in range(1, PARTS):
                top = V.largest(top, x[i])
            before = f32(m_i, row)
            now = max(before, V.maximum(top))
            factor = exp2(V.broadcast(before - now))
            total = V.mul(V.load_f32(l_i + BYTES * row), factor)
            for i in range(PARTS):
                p = exp2(V.sub(x[i], V.broadcast(now)))
                total = V.add(total, p)
                if scaled:
                    p = V.mul(p, V.load_f32(scales + BYTES * i))
                V.store_f32(at + BYTES * i, p)
            V.store_f32(l_i + BYTES * row, total)
            poke_f32(m_i + 4 * row, now)
            poke_f32(alpha + 4 * row, V.first(factor))

    return softmax
