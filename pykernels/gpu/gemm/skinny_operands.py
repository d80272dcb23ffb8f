"""Operands of ``skinny_experts``' products: where a lane has its words and inputs, and their loads.

``skinny_linear`` has other inputs, and the same left operand.

Scales of ``skinny_experts``' products, as each lane needs them: K-quants' and integers'.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.dequant_mma import pair, powers


def layouts(lane: int, warps: int, rows: int, cols: int) -> tuple[object, object, object]:
    """(words [warps, rows, 4 lane], inputs [warps, cols, 8 lane], scales [warps, rows, 4]).

    Lane 4 g + t has words lane * t .. lane * (t + 1) - 1 of rows g, g + 8, ..., their inputs of
    columns g, g + 8, ... and their scale.
    """
    parts = [[part, 0, 0] for part in powers(1, warps)]
    own = powers(1, lane)
    group = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    more_rows = [[0, row, 0] for row in powers(8, rows)]
    words = gl.DistributedLinearLayout(
        [[0, 0, a] for a in own] + more_rows,
        [[0, 0, lane], [0, 0, 2 * lane], *group],
        parts,
        [],
        [warps, rows, 4 * lane],
    )
    inputs = gl.DistributedLinearLayout(
        [[0, 0, a] for a in (1, *(2 * a for a in own))] + [[0, c, 0] for c in powers(8, cols)],
        [[0, 0, 2 * lane], [0, 0, 4 * lane], *group],
        parts,
        [],
        [warps, cols, 8 * lane],
    )
    scales = gl.DistributedLinearLayout(
        more_rows, [[0, 0, 1], [0, 0, 2], *group], parts, [], [warps, rows, 4]
    )
    return words, inputs, scales


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
    """[S, COLS, 8 LANE] pairs of inputs -> [S, 16 LANE, COLS] in the codes' order.

    Pairs, for a loop carries halves of registers only as registers of their own.
    """
    S: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    LANE: gl.constexpr = x.shape[2] // 8
    low, high = pair(x)
    v = gl.join(low, high).reshape([S, COLS, 4, LANE, 2, 2]).permute([0, 3, 5, 2, 4, 1])
    return gl.convert_layout(v.reshape([S, 16 * LANE, COLS]), B)


@gluon.jit
def spread(scale, COLS: gl.constexpr, MMA: gl.constexpr):
    """[S, ROWS, 4] of the segments -> [S, ROWS, COLS] of the columns: nothing moves."""
    S: gl.constexpr = scale.shape[0]
    ROWS: gl.constexpr = scale.shape[1]
    v = gl.join(scale, scale).reshape([S, ROWS, 8])
    if COLS >= 16:
        v = gl.join(v, v).permute([0, 1, 3, 2]).reshape([S, ROWS, 16])
    if COLS >= 32:
        v = gl.join(v, v).permute([0, 1, 3, 2]).reshape([S, ROWS, 32])
    return gl.convert_layout(v, MMA)


@gluon.jit
def load_words(
    rows, at, WORDS, chunk, CHUNKS: gl.constexpr, STRIDE: gl.constexpr, STEP: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Of each chunk of a step; ``at``: its own word of the first one.

    What is beyond the end is any number: its inputs are zeros. EVEN: there are whole steps, and
    beyond the last it comes again, since a mask costs an instruction for each two registers.
    """
    words = ()
    for c in gl.static_range(CHUNKS):
        if EVEN:
            first = gl.minimum((chunk + c) * STRIDE, WORDS - (STEP - c) * STRIDE)
            word = gl.load(rows + first, eviction_policy="evict_first")
        else:
            first = (chunk + c) * STRIDE
            word = gl.load(rows + first, mask=at < WORDS - first, eviction_policy="evict_first")
        words += (word,)  # type: ignore[assignment]
    return words


@gluon.jit
def load_inputs(xs, at, own, K, FIRST, PARTS: gl.constexpr, HALVES: gl.constexpr, KC: gl.constexpr,
                HALF: gl.constexpr):  # fmt: skip
    """Of each half of each chunk; zeros for the other segments."""
    inputs = ()
    for i in gl.static_range(PARTS):
        k = (FIRST + i // HALVES * KC + i % HALVES * HALF) // 2
        inputs += (gl.load(xs + k, mask=own & (at < K // 2 - k), other=0),)  # type: ignore[assignment]
    return inputs


@gluon.jit
def load_there(at, there, EVEN: gl.constexpr):
    """EVEN: all are there."""
    if EVEN:
        found = gl.load(at)
    else:
        found = gl.load(at, mask=there, other=0)
    return found


@gluon.jit
def load_scales(
    scales, halves, chunk, seg, K, STRIDE, CHUNKS: gl.constexpr, KC: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """What ``scales_of`` reads, of each chunk."""
    found = ()
    for c in gl.static_range(CHUNKS):
        now = chunk + c + 0 * seg
        there = now * KC < K
        if KIND == "q4_k":
            at = halves + now * 72
            own = at + seg % 2
            d = load_there(at, there, EVEN)
            low = load_there(at + 1, there, EVEN)
            a = load_there(own + 2, there, EVEN)
            b = load_there(own + 4, there, EVEN)
            m = load_there(own + 6, there, EVEN)
            found += ((d, low, a, b, m),)  # type: ignore[assignment]
        elif KIND == "q6_k":
            at = scales + now * 8 + seg
            first = load_there(at, there, EVEN)
            second = load_there(at + 4, there, EVEN)
            d = load_there(halves + now // 2 * 2, there, EVEN)
            found += ((first, second, d),)  # type: ignore[assignment]
        elif GROUP == 32:
            k = now * KC + seg * (KC // 4)
            found += (load_there(scales + k // 64 * STRIDE, k < K, EVEN),)  # type: ignore[assignment]
        elif GROUP > 0:
            found += (load_there(scales + now * KC // GROUP * STRIDE, there, EVEN),)  # type: ignore[assignment]
    return found


@gluon.jit
def scales_of(found, seg, H: gl.constexpr, KIND: gl.constexpr):
    """(scale, minimum) of a chunk's half."""
    if KIND == "q4_k":
        d, low, a, b, m = found
        ai = a.to(gl.int16, bitcast=True).to(gl.int32)
        bi = b.to(gl.int16, bitcast=True).to(gl.int32)
        mi = m.to(gl.int16, bitcast=True).to(gl.int32)
        far = seg >= 2
        s = gl.where(far, (mi & 0x0F0F) | ((ai >> 2) & 0x3030), ai & 0x3F3F)
        z = gl.where(far, ((mi >> 4) & 0x0F0F) | ((bi >> 2) & 0x3030), bi & 0x3F3F)
        scale = d.to(gl.float32) * ((s >> (8 * H)) & 255).to(gl.float32)
        least = low.to(gl.float32) * ((z >> (8 * H)) & 255).to(gl.float32)
        least += 128.0 * scale  # what the codes lie above
    elif KIND == "q6_k":
        first, second, d = found
        scale = d.to(gl.float32) * (first if H == 0 else second).to(gl.float32)
        least = 160.0 * scale
    else:
        if KIND == "int4":
            word = found & -65536 if H == 1 else found << 16
        else:
            word = gl.where(seg % 2 == 1, found & -65536, found << 16)
        scale = word.to(gl.float32, bitcast=True)
        least = scale
    return scale, least
