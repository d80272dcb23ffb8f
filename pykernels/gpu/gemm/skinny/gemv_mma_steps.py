"""Steps of ``gemv_mma``: what a lane has of weights and inputs, their loads and products
(Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...common.dequant_mma import pair, powers
from .gemv_mma_scales import load_scale, q4_k_factors, q6_k_factors, spread
from .operands import left, load_once

WRITTEN_OUT = gl.constexpr(40)
"""Most steps of a program's only block that are written out one behind the other. Loads whose first
use lies behind a loop's back edge share one scoreboard: the first used waits for the last issued.
With several blocks a loop is as fast: they are in one anyway."""
LANE = 4
"""Words of a row that a lane loads at a time."""


def inputs_layout(num_warps: int, parts: int) -> object:
    """Inputs of a product, lane 4 g + t has the t-th quarter: bfloat16 [warps, 16 LANE] or, where
    its columns are of several ``parts`` of them, pairs as int32 [warps, 8 LANE, 8]."""
    own = 4 * LANE if parts == 1 else 2 * LANE
    zeros = [] if parts == 1 else [0]
    columns = [[0, 0]] * 3 if parts == 1 else [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(
        [[0, a, *zeros] for a in powers(1, own)],
        [[0, own, *zeros], [0, 2 * own, *zeros], *columns],
        [[warp, 0, *zeros] for warp in powers(1, num_warps)],
        [],
        [num_warps, 4 * own] if parts == 1 else [num_warps, 4 * own, 8],
    )


@gluon.jit
def bits_of(words, FLIP, KIND: gl.constexpr, HALF: gl.constexpr):
    """Words -> of bytes 0 and 2, and of 1 and 3, what makes a bfloat16 of each in its place.

    Q6_K has two words, of the second two bits more for each nibble: of words 0 to 7 the lowest.
    """
    if KIND == "q6_k":
        low, high = words
        WORDS: gl.constexpr = low.type.layout
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
        high = high >> (i // 8 * 2)[None, None, :]
        top, bottom = (high, high >> 8) if HALF == 1 else (high << 4, high >> 4)
        low = low >> (4 * HALF)
        later = low >> 8
        even = (low & 0x000F000F) | (top & 0x00300030)
        odd = (later & 0x000F000F) | (bottom & 0x00300030)
    elif KIND == "int8":
        even, odd = (words ^ FLIP) & 0x00FF00FF, ((words >> 8) ^ FLIP) & 0x00FF00FF
    elif KIND == "fp8":
        even = ((words << 4) & 0x07F007F0) | ((words << 8) & -2147450880)
        odd = ((words >> 4) & 0x07F007F0) | (words & -2147450880)
    else:  # nibbles
        mask: gl.constexpr = 0x00F000F0 if HALF == 1 else 0x000F000F
        even, odd = words & mask, (words >> 8) & mask
    return even, odd


@gluon.jit
def codes_operand(words, FLIP, KIND: gl.constexpr, HALF: gl.constexpr, A: gl.constexpr):
    """[S, ROWS, 4 LANE] words (Q6_K: two of them) -> [S, ROWS, 16 LANE] codes."""
    even, odd = bits_of(words, FLIP, KIND, HALF)
    a, b = pair(even)
    c, d = pair(odd)
    return left(gl.join(gl.join(a, b), gl.join(c, d)), A)


@gluon.jit
def right_of_all(x, COLS: gl.constexpr, B: gl.constexpr):
    """[S, 16 LANE] inputs of a lane's words after each other -> [S, 16 LANE, COLS], all alike."""
    S: gl.constexpr = x.shape[0]
    LANE: gl.constexpr = x.shape[1] // 16
    v = x.reshape([S, 4, LANE, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([S, 16 * LANE])
    v = gl.convert_layout(v, gl.SliceLayout(2, B))
    return v.expand_dims(2).broadcast_to([S, 16 * LANE, COLS])


@gluon.jit
def right_of_parts(x, PARTS: gl.constexpr, LX: gl.constexpr, B: gl.constexpr):
    """[S, 8 LANE] pairs of inputs -> [S, 16 LANE, 8]: columns of a part have its lanes' inputs, and
    zeros for the others'. The sums in a lane are then of its own part."""
    S: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1]
    k = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX))) // (PAIRS // PARTS)
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX))) // (8 // PARTS)
    mine = k[None, :, None] == n[None, None, :]
    low, high = pair(gl.where(mine, x.expand_dims(2), 0))
    v = gl.join(low, high).reshape([S, 4, PAIRS // 8, 2, 8, 2]).permute([0, 2, 3, 1, 5, 4])
    return gl.convert_layout(v.reshape([S, 2 * PAIRS, 8]), B)


@gluon.jit
def stage_inputs(
    value, x, x_sums, S: gl.constexpr, BLOCK: gl.constexpr, OFFSET: gl.constexpr, UP: gl.constexpr
):
    """[STEPS, inputs of a step] to shared memory: x in the codes' order, total [STEPS * (halves
    with sums of their own) * S, PARTS] -OFFSET times the sums that belong to it.

    Args:
        BLOCK: inputs of a half that lie side by side.
        UP: a power of two for the inputs of second halves.
    """
    STEPS: gl.constexpr = value.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    HALVES: gl.constexpr = value.shape[1] // (S * WIDTH)
    if OFFSET > 0:
        # As they lie: Triton 3.6 adds up the wrong lanes where those of a sum are no neighbours.
        PARTS: gl.constexpr = x_sums.shape[1]
        OWN: gl.constexpr = x_sums.shape[0] // (STEPS * S)
        EACH: gl.constexpr = value.shape[1] // (S * PARTS * OWN)
        if BLOCK == WIDTH:
            v = value.to(gl.float32).reshape([STEPS, S, OWN, PARTS, EACH])
            sums = gl.sum(v, axis=4).permute([0, 2, 1, 3])
        else:
            v = value.to(gl.float32).reshape([STEPS, S, PARTS, OWN, EACH])
            sums = gl.sum(v, axis=4).permute([0, 3, 1, 2])
        sums = sums.reshape([STEPS * OWN * S, PARTS])
        x_sums.store(sums * (-OFFSET * 2.0**-69))
    v = value.reshape([STEPS, S, WIDTH // BLOCK, HALVES, BLOCK // 4, 2, 2])
    v = v.permute([0, 3, 1, 2, 4, 6, 5]).reshape([STEPS, HALVES, S, WIDTH]).to(gl.float32)
    L: gl.constexpr = v.type.layout
    half = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    up = gl.where(half == 0, 2.0**64, UP)[None, :, None, None]
    x.store((v * up).to(gl.bfloat16).reshape([STEPS * HALVES * S, WIDTH]))


@gluon.jit
def codes_of(w, n, first, s, i, CODES, WORDS, KIND: gl.constexpr):
    """Where the words of rows n begin, [S, ROWS, 16]; of Q6_K and where the two bits more do."""
    row = w + n.to(gl.int64)[None, :, None] * WORDS
    at = row + first
    if KIND == "q6_k":
        at = (at, row + (CODES + (s * 8)[:, None, None] + (i % 8)[None, None, :]))
    return at


@gluon.jit
def load_step(at, step, left_over, EVEN: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr):
    """Words of a step, STRIDE behind those of the last; ``left_over``: how many words of a row each
    lane's first one leaves, of which a step has WIDTH."""
    if EVEN:
        return load_once(at + step * STRIDE, None, None)
    mask = left_over > step * WIDTH
    return load_once(at + step * STRIDE, mask, 0)


@gluon.jit
def multiply_step(
    acc,
    words,
    scale,
    x,
    x_sums,
    chunk,
    FLIP,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    LX: gl.constexpr,
    LC: gl.constexpr,
    LF: gl.constexpr,
):
    """acc plus a step's products; x [HALVES S, inputs] and total [S or HALVES S, PARTS] are
    shared."""
    COLS: gl.constexpr = acc.shape[2]
    S: gl.constexpr = acc.shape[0]
    HALVES: gl.constexpr = x.shape[0] // S
    PARTS: gl.constexpr = x_sums.shape[1]
    MMA: gl.constexpr = acc.type.layout
    LS: gl.constexpr = gl.SliceLayout(3, LF)
    zero = gl.full(acc.shape, 0.0, gl.float32, layout=MMA)
    part = acc
    if KIND == "q4_k":
        factors = q4_k_factors(scale, chunk, LS)
    for h in gl.static_range(HALVES):
        if PARTS > 1:
            b = right_of_parts(x.slice(h * S, S).load(gl.SliceLayout(2, LX)), PARTS, LX, B)
        else:
            b = right_of_all(x.slice(h * S, S).load(LX), COLS, B)
        a = codes_operand(words, FLIP, KIND, h, A)
        if h * S < x_sums.shape[0]:
            first = zero
            if KIND != "fp8":
                sums = x_sums.slice(h * S, S).load(gl.SliceLayout(1, LS))
                first = spread(sums[:, None, :], LC, MMA).broadcast_to(acc.shape)
            part = acc + first if GROUP == 0 else first
        if KIND == "q4_k":
            weight, least = factors[h]
            acc += mma_v2(a, b, zero) * spread(weight, LC, MMA)
            acc += first * spread(least, LC, MMA)
        else:
            part = mma_v2(a, b, part)
            if KIND == "q6_k":
                acc += part * spread(q6_k_factors(scale, h, LS), LC, MMA)
            elif GROUP == 32:
                if KIND == "int4":
                    sc = scale & -65536 if h == 1 else scale << 16
                else:
                    own = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))
                    sc = gl.where((own == 1)[None, None, :], scale & -65536, scale << 16)
                acc += part * spread(sc.to(gl.float32, bitcast=True), LC, MMA)
    if GROUP == 0:
        acc = part
    elif GROUP > 32:
        factors = scale if KIND == "fp8" else scale.to(gl.float32, bitcast=True)
        acc += part * spread(factors, LC, MMA)
    return acc


@gluon.jit
def load_fence():
    """No load is moved over this: the assembler moves the next step's down to where this step's
    products free registers, and memory waits for the products. It is no instruction."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch(
    at,
    scales,
    chunk,
    step,
    left_over,
    N,
    K,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    EVEN: gl.constexpr,
    LF: gl.constexpr,
):
    """Words and scales of a step; ``chunk``: each warp's part of it. One scale an output: none.

    EVEN: no lane is behind its row. Masks take registers, so of the steps that are written out only
    a last one that is not whole has them.
    """
    S: gl.constexpr = chunk.shape[0]
    if KIND == "q6_k":
        low, high = at
        words = (
            load_step(low, step, left_over, EVEN, S * 16, S * 16),
            load_step(high, step, left_over, EVEN, S * 16, S * 8),
        )
    else:
        WIDTH: gl.constexpr = S * (18 if KIND == "q4_k" else 16)
        words = load_step(at, step, left_over, EVEN, WIDTH, WIDTH)
    scale = chunk
    if GROUP > 0:
        KC: gl.constexpr = 64 if KIND == "int8" or KIND == "fp8" else 128
        scale = load_scale(scales, chunk, step, N, K, KC, GROUP, KIND, EVEN, LF)
    return words, scale


@gluon.jit
def multiply_block(
    words,
    scale,
    at,
    scales,
    at_next,
    scales_next,
    xs,
    sums,
    chunk,
    left_over,
    N,
    K,
    FLIP,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    STEPS: gl.constexpr,
    EVEN: gl.constexpr,
    ROWS: gl.constexpr,
    LAST: gl.constexpr,
    AHEAD: gl.constexpr,
    MMA: gl.constexpr,
    LX: gl.constexpr,
    LC: gl.constexpr,
    LF: gl.constexpr,
):
    """A block of rows times all inputs: sums [S, ROWS, 8], columns of a part all alike.

    Args:
        words, scale: of the first steps, prefetched. Those of the next block's first steps, which
            ``at_next`` and ``scales_next`` lead to, are prefetched here and returned, unless LAST.
    """
    S: gl.constexpr = chunk.shape[0]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ALL: gl.constexpr = LAST and STEPS <= WRITTEN_OUT
    ROLLED: gl.constexpr = 0 if ALL else (STEPS - AHEAD) // AHEAD * AHEAD
    acc = gl.full([S, ROWS, 8], 0.0, gl.float32, layout=MMA)
    for turn in range(0, ROLLED // AHEAD):
        for q in gl.static_range(AHEAD):
            step = turn * AHEAD + q
            words_now, scale_now = words[q], scale[q]
            next_words, factors = prefetch(
                at, scales, chunk, step + AHEAD, left_over, N, K, KIND, GROUP, EVEN, LF
            )
            words = words[:q] + (next_words,) + words[q + 1 :]
            scale = scale[:q] + (factors,) + scale[q + 1 :]
            load_fence()
            acc = multiply_step(
                acc,
                words_now,
                scale_now,
                xs.index(step),
                sums.index(step),
                chunk,
                FLIP,
                KIND,
                GROUP,
                A,
                B,
                LX,
                LC,
                LF,
            )
    for t in gl.static_range(ROLLED, STEPS):
        words_now, scale_now = words[t % AHEAD], scale[t % AHEAD]
        next_words, factors = words_now, scale_now
        if t + AHEAD < STEPS:
            next_words, factors = prefetch(
                at,
                scales,
                chunk,
                t + AHEAD,
                left_over,
                N,
                K,
                KIND,
                GROUP,
                EVEN or t + AHEAD < STEPS - 1,
                LF,
            )
        elif not LAST:
            next_words, factors = prefetch(
                at_next,
                scales_next,
                chunk,
                t + AHEAD - STEPS,
                left_over,
                N,
                K,
                KIND,
                GROUP,
                EVEN or t + AHEAD - STEPS < STEPS - 1,
                LF,
            )
        words = words[: t % AHEAD] + (next_words,) + words[t % AHEAD + 1 :]
        scale = scale[: t % AHEAD] + (factors,) + scale[t % AHEAD + 1 :]
        load_fence()
        acc = multiply_step(
            acc,
            words_now,
            scale_now,
            xs.index(t),
            sums.index(t),
            chunk,
            FLIP,
            KIND,
            GROUP,
            A,
            B,
            LX,
            LC,
            LF,
        )
    TURN: gl.constexpr = STEPS % AHEAD
    return words[TURN:] + words[:TURN], scale[TURN:] + scale[:TURN], acc


@gluon.jit
def own_rows(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. ROWS, as a layout of [S, ROWS, ..] has them."""
    return gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))


@gluon.jit
def block_sums(acc, KIND: gl.constexpr, PARTS: gl.constexpr):
    """[S, ROWS, 8] of the warps, columns of a part all alike -> [ROWS]."""
    DOWN: gl.constexpr = (2.0**56 if KIND == "fp8" else 2.0**69) / 8 * PARTS
    return gl.sum(gl.sum(acc, axis=2), axis=0) * DOWN
