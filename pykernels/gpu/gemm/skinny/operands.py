"""Operands of the register GEMMs ``skinny_linear``, ``skinny_experts`` and ``gemv_mma`` (Gluon).

Weights are the left operand of ``mma.sync``: each lane loads the words of the rows that it
multiplies, 16 or 32 bytes at a time, and dequantizes them where they are. K is permuted so that a
lane's words are its part of the operand; inputs are loaded in the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.dequant_mma import pair, powers

_GROUP = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
"""Lane 4 g + t has rows, and columns, g, g + 8, ..."""


def words_layout(lane: int, num_warps: int, rows: int) -> object:
    """[warps, rows, 4 lane] words: lane 4 g + t has words lane * t .. lane * (t + 1) - 1."""
    return gl.DistributedLinearLayout(
        [[0, 0, a] for a in powers(1, lane)] + [[0, row, 0] for row in powers(8, rows)],
        [[0, 0, lane], [0, 0, 2 * lane], *_GROUP],
        [[part, 0, 0] for part in powers(1, num_warps)],
        [],
        [num_warps, rows, 4 * lane],
    )


def inputs_layout(own: int, num_warps: int, cols: int) -> object:
    """[warps, cols, 4 own] inputs of those words, or pairs of them: ``own`` are a lane's."""
    return gl.DistributedLinearLayout(
        [[0, 0, a] for a in powers(1, own)] + [[0, c, 0] for c in powers(8, cols)],
        [[0, 0, own], [0, 0, 2 * own], *_GROUP],
        [[part, 0, 0] for part in powers(1, num_warps)],
        [],
        [num_warps, cols, 4 * own],
    )


def scales_layout(num_warps: int, rows: int) -> object:
    """[warps, rows, 4]: a scale for each lane's words."""
    return gl.DistributedLinearLayout(
        [[0, row, 0] for row in powers(8, rows)],
        [[0, 0, 1], [0, 0, 2], *_GROUP],
        [[part, 0, 0] for part in powers(1, num_warps)],
        [],
        [num_warps, rows, 4],
    )


@gluon.jit
def left(v, A: gl.constexpr):
    """[S, ROWS, 4 LANE, 2, 2] codes -> [S, ROWS, 16 LANE]."""
    S: gl.constexpr = v.shape[0]
    ROWS: gl.constexpr = v.shape[1]
    LANE: gl.constexpr = v.shape[2] // 4
    v = v.reshape([S, ROWS, 4, LANE, 2, 2]).permute([0, 1, 3, 5, 2, 4])
    return gl.convert_layout(v.reshape([S, ROWS, 16 * LANE]), A)


@gluon.jit
def right(x, B: gl.constexpr):
    """[S, COLS, 16 LANE] inputs, or [S, COLS, 8 LANE] pairs of them, -> [S, 16 LANE, COLS] in the
    codes' order.

    Pairs, for a loop carries halves of registers only as registers of their own.
    """
    S: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    v = x
    LANE: gl.constexpr = x.shape[2] // (8 if x.dtype == gl.int32 else 16)
    if x.dtype == gl.int32:
        low, high = pair(x)
        v = gl.join(low, high)
    v = v.reshape([S, COLS, 4, LANE, 2, 2]).permute([0, 3, 5, 2, 4, 1])
    return gl.convert_layout(v.reshape([S, 16 * LANE, COLS]), B)


@gluon.jit
def load_once(at, mask, other):
    """Weights are read once: they leave L2 first, inputs and scales stay."""
    return gl.load(at, mask=mask, other=other, eviction_policy="evict_first")


@gluon.jit
def load_words(
    rows,
    at,
    WORDS,
    chunk,
    CHUNKS: gl.constexpr,
    STRIDE: gl.constexpr,
    STEP: gl.constexpr,
    EVEN: gl.constexpr,
    other,
):
    """Words of each chunk of a step, the chunks STRIDE words apart; those beyond the end are
    ``other``, or with None any number: their inputs are zeros.

    Args:
        at: a lane's own word of the first chunk.
        EVEN: K is whole steps. Beyond the last one it is loaded again, since a mask costs an
            instruction for each two registers.
    """
    words = ()
    for c in gl.static_range(CHUNKS):
        if EVEN:
            first = gl.minimum((chunk + c) * STRIDE, WORDS - (STEP - c) * STRIDE)
            word = load_once(rows + first, None, None)
        else:
            first = (chunk + c) * STRIDE
            word = load_once(rows + first, at < WORDS - first, other)
        words += (word,)  # type: ignore[assignment]
    return words
