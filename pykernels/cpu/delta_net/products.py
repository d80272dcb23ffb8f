"""What meets a strip of the state: rows of keys and queries that read it, and its update.

A *strip* is a few vectors of columns of one head's state [DK, DV], all DK rows of them.
"""

from __future__ import annotations

import functools
from typing import Any

from ..jit import inlined
from ..vectors import make_vectors

UNROLL = 4


@functools.cache
def make_read(DK: int, DV: int, N: int, R: int, C: int, wide: int, apart: int = 1) -> Any:
    """``read(x, state, to)``: R rows of x times a strip of C vectors.

    x float32 [R, DK]; state float32 [DK, wide] and to [R, DV], both at the strip. Rows of x and
    of the result are so many rows ``apart``.
    """
    V: Any = make_vectors(N)
    BYTES, SUMS = 4 * N, R * C

    @inlined
    def read(x, state, to):
        sums = V.array(SUMS)
        for i in range(SUMS):
            sums[i] = V.zero()
        for _ in range(0, DK, UNROLL):
            for u in range(UNROLL):
                s = V.array(C)
                for c in range(C):
                    s[c] = V.load_f32(state + 4 * wide * u + BYTES * c)
                for r in range(R):
                    factor = V.broadcast_at(x + 4 * DK * apart * r + 4 * u)
                    for c in range(C):
                        sums[C * r + c] = V.fma(factor, s[c], sums[C * r + c])
            state += 4 * wide * UNROLL
            x += 4 * UNROLL
        for r in range(R):
            for c in range(C):
                V.store_f32(to + 4 * DV * apart * r + BYTES * c, sums[C * r + c])

    return read


@functools.cache
def make_update(DK: int, DV: int, N: int, R: int, C: int, wide: int) -> Any:
    """``update(k, delta, state, decay)``: ``decay state + k^T delta`` of R rows, on a strip.

    k float32 [R, DK]; delta float32 [R, DV] and state [DK, wide], both at the strip.
    """
    V: Any = make_vectors(N)
    BYTES, DELTAS = 4 * N, R * C

    @inlined
    def update(k, delta, state, decay):
        by, deltas = V.broadcast(decay), V.array(DELTAS)
        for r in range(R):
            for c in range(C):
                deltas[C * r + c] = V.load_f32(delta + 4 * DV * r + BYTES * c)
        for _ in range(0, DK, UNROLL):
            for u in range(UNROLL):
                s = V.array(C)
                for c in range(C):
                    s[c] = V.mul(by, V.load_f32(state + 4 * wide * u + BYTES * c))
                for r in range(R):
                    factor = V.broadcast_at(k + 4 * DK * r + 4 * u)
                    for c in range(C):
                        s[c] = V.fma(factor, deltas[C * r + c], s[c])
                for c in range(C):
                    V.store_f32(state + 4 * wide * u + BYTES * c, s[c])
            state += 4 * wide * UNROLL
            k += 4 * UNROLL

    return update
