"""The loop over K of ``dequant_gemm`` (Gluon, Hopper).

The transposed tile: a warpgroup's left operand are weights in registers, dequantized (see
``common.dequant_mma``) while the tensor cores still multiply the 64 inputs before. Words and inputs
come by the tensor memory accelerator, several steps ahead. A lane of the product dequantizes whole
words, so K is permuted: ``permute_k`` does the same to x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.dequant_mma import codes, e4m3s_below, pair, powers
from ...common.gluon_compat import barrier, tma_load
from .k_quants import load_heads, q6_k_codes, row_starts, unpack_heads, weighted

SCALE_UP = gl.constexpr(2.0**96)
"""What E4M3's scales are multiplied by: the codes lie 2**-120 below, and a bfloat16 must hold any
weight on the way, and any scale."""
REST_UP = gl.constexpr(2.0**24)


def words_layout(num_warps: int, rows: int) -> object:
    """[rows warps, 16] words: lane 4 g + t has words 4 t .. 4 t + 3 of its warp's rows g (and, of
    16 rows, g + 8)."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *([row, 0] for row in powers(8, rows))],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[row, 0] for row in powers(rows, rows * num_warps)],
        [],
        [rows * num_warps, 16],
    )


@gluon.jit
def copy_words(
    w,
    row,
    up,
    tile,
    ready,
    ws,
    buffer,
    KIND: gl.constexpr,
    GATED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copies of one tile of words; gated, of gate and of up."""
    mbarrier.expect(ready.index(buffer), WARPS * 16 * 64)
    column = tile * 16
    if KIND == "q4_k":
        column += tile // 2 * 4 + 4  # behind the words of each block's scales
    if GATED:
        tma_load(w, [row, column], ready.index(buffer), ws.index(2 * buffer))
        tma_load(w, [up, column], ready.index(buffer), ws.index(2 * buffer + 1))
    else:
        tma_load(w, [row, column], ready.index(buffer), ws.index(buffer))


@gluon.jit
def load_tile_words(ws, buffer, LW: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr):
    """[ROWS, 16] words; gated, of every 16 rows the first 8 are gate's and the others up's, so that
    both products of an output end in one lane."""
    if GATED:
        both = gl.join(ws.index(2 * buffer).load(LW), ws.index(2 * buffer + 1).load(LW))
        return both.reshape([WARPS, 8, 16, 2]).permute([0, 3, 1, 2]).reshape([16 * WARPS, 16])
    else:
        return ws.index(buffer).load(LW)


@gluon.jit
def scaled(v, words, scale, KIND: gl.constexpr, H: gl.constexpr):
    """Codes [ROWS, 16, 2, 2] of product H of a step, times the scales of groups of 32 inputs: a
    lane's words lie within one group."""
    WORDS: gl.constexpr = words.type.layout
    later = (gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS)) >= 8)[None, :]
    even = gl.convert_layout(scale[0], gl.SliceLayout(1, WORDS))[:, None] + gl.zeros_like(words)
    odd = gl.convert_layout(scale[1], gl.SliceLayout(1, WORDS))[:, None] + gl.zeros_like(words)
    if KIND == "int4" or KIND == "mxfp4":
        both = gl.where(later, odd, even)
        if H == 1:
            both = both >> 16
    elif H == 0:
        both = gl.where(later, even >> 16, even)
    else:
        both = gl.where(later, odd >> 16, odd)
    own, _ = pair(both)
    own = gl.join(own, own)
    return v * gl.join(own, own)


@gluon.jit
def operand(
    words, scale, MAGIC, KIND: gl.constexpr, GROUP: gl.constexpr, H: gl.constexpr, A: gl.constexpr
):
    """[ROWS, 16] words (of nibbles: their bytes' low halves) -> [ROWS, 64] weights."""
    ROWS: gl.constexpr = words.shape[0]
    if KIND == "q6_k":
        v = q6_k_codes(words, scale[2], MAGIC, H)
        v = weighted(v, scale[H], None)
    elif KIND == "q4_k":
        v = weighted(codes(words, MAGIC, "int4"), scale[2 * H], scale[2 * H + 1])
    elif KIND == "fp8":
        v = e4m3s_below(words)
    else:
        v = codes(words, MAGIC, KIND)
    if GROUP == 32:
        v = scaled(v, words, scale, KIND, H)
    v = v.reshape([ROWS, 4, 4, 2, 2]).permute([0, 2, 4, 1, 3])
    a = gl.convert_layout(v.reshape([ROWS, 64]), A)
    if KIND == "fp8":  # scales in two parts, so that a weight is rounded once
        s = scale.to(gl.float32, bitcast=True) * SCALE_UP
        high = s.to(gl.bfloat16)
        low = (s - high.to(gl.float32)).to(gl.bfloat16)
        a = gl.fma(a, high[:, None] + gl.zeros_like(a), a * low[:, None])
    elif GROUP == 128:
        a = a * scale.to(gl.float32, bitcast=True).to(gl.bfloat16)[:, None]
    return a


@gluon.jit
def rows_of(n0, N, ROWS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile's rows, those behind N the last one; gated, and whether they are up's."""
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    n = r
    up = 0
    if GATED:
        n = r // 16 * 8 + r % 8
        up = r // 8 % 2
    return gl.minimum(n0 + n, N - 1), up


@gluon.jit
def scale_offsets(
    matrix,
    n0,
    N,
    SCALES,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Where the scales of a tile's rows begin, in words: int64, experts may be many."""
    n, up = rows_of(n0, N, ROWS, GATED, LAYOUT)
    matrix = matrix.to(gl.int64) + up
    if KIND == "fp8":
        return (matrix * gl.cdiv(N, 128) + n // 128) * SCALES
    else:
        return matrix * SCALES * N + n


@gluon.jit
def load_scale(scales, c, last, stride, GROUP: gl.constexpr):
    """Each row's scale in step c: for groups of 32 the words of both halves, without groups 0."""
    if GROUP == 32:
        even = gl.load(scales + gl.minimum(2 * c, last) * stride)
        return even, gl.load(scales + gl.minimum(2 * c + 1, last) * stride)
    elif GROUP > 0:
        return gl.load(scales + gl.minimum(c, last) * stride)
    else:
        return 0


@gluon.jit
def multiply_tile(
    x,
    w,
    w_scale,
    xs,
    ws,
    x_ready,
    w_ready,
    expert,
    m0,
    n0,
    N,
    STEPS,
    c0,
    count,
    done,
    SCALES,
    MAGIC,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    COLS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    WORD_STAGES: gl.constexpr,
    LW: gl.constexpr,
    LH: gl.constexpr,
):
    """float32 [16 WARPS, COLS]: the sum of ``count`` steps of 128 inputs from ``c0`` on.

    A step is two products, so that two sets of registers take turns: a copy of one to the other
    would have to wait for the product.

    Args:
        done: steps that this program has multiplied before.
    """
    ROWS: gl.constexpr = 16 * WARPS
    MATS: gl.constexpr = 2 if GATED else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TILES: gl.constexpr = 2 if KIND == "int8" or KIND == "fp8" else 1  # of words, a step
    matrix = gl.maximum(expert, 0) * MATS
    row = matrix * N + n0
    i0 = done * 2
    t0 = done * TILES
    for q in gl.static_range(WORD_STAGES):
        if q < count * TILES:
            buffer = (t0 + q) % WORD_STAGES
            copy_words(w, row, row + N, c0 * TILES + q, w_ready, ws, buffer, KIND, GATED, WARPS)
    for q in gl.static_range(STAGES - 1):
        if q < count * 2:
            to = (i0 + q) % STAGES
            mbarrier.expect(x_ready.index(to), COLS * 128)
            tma_load(x, [m0, (c0 * 2 + q) * 64], x_ready.index(to), xs.index(to))
    if GROUP != 256:
        scales = w_scale + scale_offsets(matrix, n0, N, SCALES, KIND, ROWS, GATED, A)
        last = SCALES - 1
        stride = 1 if KIND == "fp8" else N
        scale = load_scale(scales, c0, last, stride, GROUP)
        scale_1 = load_scale(scales, c0 + 1, last, stride, GROUP)
        scale_2 = load_scale(scales, c0 + 2, last, stride, GROUP)
    acc = gl.full([ROWS, COLS], 0.0, gl.float32, layout=ACC)
    if count > 0:
        mbarrier.wait(w_ready.index(t0 % WORD_STAGES), t0 // WORD_STAGES & 1)
    words = load_tile_words(ws, t0 % WORD_STAGES, LW, GATED, WARPS)
    if GROUP == 256:
        own_row, up = rows_of(n0, N, ROWS, GATED, LH)
        heads = row_starts(w_scale, (matrix + up) * N + own_row, SCALES, KIND, LH)
        scale = unpack_heads(load_heads(heads, c0, STEPS, KIND, LH), words, c0, KIND)
    a = operand(words, scale, MAGIC, KIND, GROUP, 0, A)
    before = a
    for c in range(0, count):
        for h in gl.static_range(2):
            i = c * 2 + h
            stage = (i0 + i) % STAGES
            mbarrier.wait(x_ready.index(stage), (i0 + i) // STAGES & 1)
            token = warpgroup_mma(a, xs.index(stage).permute((1, 0)), acc, is_async=True)
            acc, before = warpgroup_mma_wait(1, deps=[token, before])
            barrier()  # all have read the inputs of product i - 1 and the words of this one
            j = i + STAGES - 1
            to = (i0 + j) % STAGES
            if j < count * 2:
                mbarrier.expect(x_ready.index(to), COLS * 128)
                tma_load(x, [m0, (c0 * 2 + j) * 64], x_ready.index(to), xs.index(to))
            if h < TILES:
                tile = c * TILES + h
                if tile + WORD_STAGES < count * TILES:
                    ahead = c0 * TILES + tile + WORD_STAGES
                    buffer = (t0 + tile) % WORD_STAGES
                    copy_words(w, row, row + N, ahead, w_ready, ws, buffer, KIND, GATED, WARPS)
            before = a
            if h == 1 or TILES == 2:
                ahead = gl.minimum(c * TILES + (h if TILES == 2 else 0) + 1, count * TILES - 1)
                buffer = (t0 + ahead) % WORD_STAGES
                mbarrier.wait(w_ready.index(buffer), (t0 + ahead) // WORD_STAGES & 1)
                words = load_tile_words(ws, buffer, LW, GATED, WARPS)
            if GROUP == 256:
                if h == 0:
                    head = load_heads(heads, c0 + c + 1, STEPS, KIND, LH)
                else:
                    scale = unpack_heads(head, words, c0 + c + 1, KIND)
            elif h == 1:
                scale = scale_1
                scale_1 = scale_2
                scale_2 = load_scale(scales, c0 + c + 3, last, stride, GROUP)
            if h == 1 or TILES == 2:
                a = operand(words, scale, MAGIC, KIND, GROUP, 1 - h, A)
            else:
                a = operand(words >> 4, scale, MAGIC, KIND, GROUP, 1, A)
    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
    barrier()
    if GROUP == 0:
        own = gl.load(w_scale + scale_offsets(matrix, n0, N, SCALES, KIND, ROWS, GATED, ACC))
        own = gl.where(expert < 0, 0, own)  # no tile: nothing was multiplied
        acc *= own.to(gl.float32, bitcast=True)[:, None]
    if KIND == "fp8":
        acc *= REST_UP
    return acc
