"""Rows of bfloat16 or E4M3 to columns: a block's transposition in registers, of pairs."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types

from ..intrin.codegen import emits, load, pointer, shuffle
from ..intrin.registers import I32

LANE = 4
"""Words of a 128-bit lane, which unpack instructions do not cross."""


def _unpack(builder, a, b, size, second):
    """One half of each lane: runs of ``size`` words of a and b in turns."""
    n, start = a.type.count, 2 if second else 0
    order = []
    for lane in range(0, n, LANE):
        for run in range(0, 2, size):
            at = [lane + start + run + i for i in range(size)]
            order += at + [n + i for i in at]
    return shuffle(builder, a, b, order)


def _lanes(builder, a, b, chosen):
    """Two lanes of a, then two of b; of one lane each where vectors have two."""
    n, half = a.type.count, len(chosen) // 2
    starts = [LANE * lane for lane in chosen[:half]] + [n + LANE * lane for lane in chosen[half:]]
    return shuffle(builder, a, b, [start + i for start in starts for i in range(LANE)])


def _transpose(builder, rows):
    """n vectors of n words, n = 8 or 16: the n columns."""
    n = len(rows)
    columns: list[Any] = [None] * n
    quads = []  # [n / 4][4]: of 4 rows column 4 l + c in lane l of the c-th
    for at in range(0, n, 4):
        low, high = (
            [_unpack(builder, a, b, 1, second) for second in (False, True)]
            for a, b in (rows[at : at + 2], rows[at + 2 : at + 4])
        )
        quads.append(
            [_unpack(builder, low[i], high[i], 2, second) for i in (0, 1) for second in (0, 1)]
        )
    for c in range(4):
        parts = [quad[c] for quad in quads]
        if n == 8:
            for lane in range(2):
                columns[4 * lane + c] = _lanes(builder, parts[0], parts[1], (lane, lane))
            continue
        for pair in range(2):
            low, high = (
                _lanes(builder, parts[i], parts[i + 1], (2 * pair, 2 * pair + 1) * 2)
                for i in (0, 2)
            )
            for odd in range(2):
                columns[4 * (2 * pair + odd) + c] = _lanes(builder, low, high, (odd, 2 + odd) * 2)
    return columns


@functools.cache
def make_transpose(n: int, widen: bool, coded: bool = False) -> Any:
    """``transpose(rows, stride, to, to_stride)``: n rows of 2 n bfloat16, ``stride`` bytes apart,
    to n rows of n pairs; ``widen``: to 2 n rows of n float32. n is 8 or 16.

    ``coded``: rows of E4M3, of which 2**-120 is a bfloat16.
    """
    words, halves = ir.VectorType(I32, n), ir.VectorType(ir.IntType(16), 2 * n)
    codes = ir.VectorType(ir.IntType(8), 2 * n)

    def pairs(builder, row):
        if not coded:
            return load(builder, row, words, 2)
        by, to, mask = (ir.Constant(halves, [value] * 2 * n) for value in (8, 4, 0x87F0))
        top = builder.shl(builder.zext(load(builder, row, codes, 1), halves), by)
        return builder.bitcast(builder.and_(builder.ashr(top, to), mask), words)

    @emits(types.void, types.intp, types.intp, types.intp, types.intp)
    def transpose_pairs(builder, rows, stride, to, to_stride):
        loaded = []
        for _ in range(n):
            loaded.append(pairs(builder, rows))
            rows = builder.add(rows, stride)
        shift, upper = (ir.Constant(words, [value] * n) for value in (16, 0xFFFF0000))
        for column in _transpose(builder, loaded):
            floats = builder.shl(column, shift), builder.and_(column, upper)
            for value in floats if widen else (column,):
                builder.store(value, pointer(builder, to, words)).align = 4
                to = builder.add(to, to_stride)

    return transpose_pairs
