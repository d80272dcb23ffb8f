"""What tiles of few tokens are, whatever multiplies: the stages call any by address.

The routine ``tiles(M, w, then, scale, first, last, K, rows, tables, out)`` computes
``out[t, n] = sum_k w[n, k] * x_t[k]`` for the 32 rows n of a packed block and M tokens t, over the
128-wide input blocks ``first .. last - 1``; from ``first`` 0 on, later ones add to ``out``.

Args of the routine (addresses are int64):
    M: tokens, at most MAX_TOKENS. An M that has no tile of its own runs the next larger one (the
        pass over the weights is what costs), so ``rows`` holds MAX_TOKENS addresses, the last one
        repeated, and ``out`` as many rows.
    w: packed block (``quant.layout``), 64-byte aligned.
    then: what is read after it, for prefetches that run ahead beyond its end.
    scale: the block's packed scales, unread if the format has none.
    first, last: input blocks of 128, counted from the start of w, scale and the inputs.
    K: inputs of a row, padded.
    rows: int64 [MAX_TOKENS], address of each token's row (``activations.row_layout``).
    tables: ``weights.lookup.TABLES``.
    out: float32 [MAX_TOKENS, 32].
"""

from __future__ import annotations

from typing import Any

from numba import carray, types

from ..intrin.sync import as_pointer
from ..jit import inlined, routine
from ..words import i64

MAX_TOKENS = 8
"""Tokens of one pass over the weights: 16 accumulators and dequantization fill the registers of
AVX-512."""

ARGUMENTS = 10
"""``tiles`` has so many."""


@inlined
def point_at_rows(rows, capacity, base, stride, pairs, first, count):
    """rows[i] = address of pair ``first + i``'s input, the last one repeated up to ``capacity``.

    Args:
        pairs: int64, which row of ``base`` each slot has; 0: their own.
    """
    addresses = carray(as_pointer(rows), (capacity,), types.int64)
    for i in range(capacity):
        pair = first + min(i, count - 1)
        row = i64(pairs, pair) if pairs != 0 else pair
        addresses[i] = base + row * stride


@inlined
def ahead(w, distance, end, then):
    """What lies so far ahead of w in the stream, which jumps from a block's end to ``then``."""
    at = w + distance
    return at if at < end else at + (then - end)


def by_tokens(each: dict[int, Any], variant: str) -> Any:
    """Compiles ``tiles`` of the tiles of 1, 2, 4 and 8 tokens, which take its arguments after M."""
    tile1, tile2, tile4, tile8 = (each[M] for M in (1, 2, 4, 8))

    @routine(ARGUMENTS, variant)
    def tiles(M, w, then, scale, first, last, K, rows, tables, out):
        if M == 1:
            tile1(w, then, scale, first, last, K, rows, tables, out)
        elif M == 2:
            tile2(w, then, scale, first, last, K, rows, tables, out)
        elif M <= 4:
            tile4(w, then, scale, first, last, K, rows, tables, out)
        else:
            tile8(w, then, scale, first, last, K, rows, tables, out)
        return 0

    return tiles
