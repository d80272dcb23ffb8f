"""Scales of ``gemv_mma``: where they are, beside which sums they lie, K-quants' own (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.dequant_mma import powers
from ..hopper.k_quants import half, number


def columns_layout(num_warps: int, rows: int, parts: int) -> object:
    """A product's sums [warps, rows, parts, 8 // parts] as they lie: lane 4 g + t has those of rows
    g, g + 8, ... and of two columns."""
    t = {
        1: [[0, 0, 0, 2], [0, 0, 0, 4]],
        2: [[0, 0, 0, 2], [0, 0, 1, 0]],
        4: [[0, 0, 1, 0], [0, 0, 2, 0]],
    }[parts]
    return _of_rows([[0, 0, 0, 1]], t, num_warps, rows, parts, 8 // parts)


def block_heads_layout(num_warps: int, rows: int) -> object:
    """Heads [warps, rows, 2, 4] of Q4_K's blocks beside the sums of their rows."""
    words = [[0, 0, 0, 1], [0, 0, 0, 2]]
    return _of_rows(words, [[0, 0, 0, 0], [0, 0, 1, 0]], num_warps, rows, 2, 4)


def _of_rows(
    own: list[list[int]], t: list[list[int]], num_warps: int, rows: int, parts: int, width: int
) -> object:
    return gl.DistributedLinearLayout(
        own + [[0, row, 0, 0] for row in powers(8, rows)],
        [*t, [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[warp, 0, 0, 0] for warp in powers(1, num_warps)],
        [],
        [num_warps, rows, parts, width],
    )


@gluon.jit
def spread(factors, LC: gl.constexpr, MMA: gl.constexpr):
    """[S, ROWS, PARTS] -> [S, ROWS, 8], as the columns of sums are of parts."""
    S: gl.constexpr = factors.shape[0]
    ROWS: gl.constexpr = factors.shape[1]
    PARTS: gl.constexpr = factors.shape[2]
    x = gl.convert_layout(factors, gl.SliceLayout(3, LC))
    x = x.expand_dims(3).broadcast_to([S, ROWS, PARTS, 8 // PARTS])
    return gl.convert_layout(x.reshape([S, ROWS, 8]), MMA)


@gluon.jit
def q6_k_words(K):
    """Words of a row: 53 per block, and zeros."""
    return gl.cdiv(K // 256 * 53, 4) * 4


@gluon.jit
def scales_of(w, w_scale, n, chunk, K, KIND: gl.constexpr, LF: gl.constexpr):
    """Where the scales of rows n begin, [1, ROWS, 1], or those of a chunk: heads of Q4_K's blocks
    [S, ROWS, 1, 4]; Q6_K's two words of a chunk [S, ROWS, 1, 2] and the block's [S, ROWS, 1]."""
    if KIND == "q4_k":
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LF))))
        at = w + n.to(gl.int64)[None, :, None, None] * (K // 256 * 36)
        at = at + (chunk // 2 * 36)[:, None, None, None] + word[None, None, None, :]
    elif KIND == "q6_k":
        word = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LF))))
        row = w + n.to(gl.int64) * q6_k_words(K)
        pairs = row[None, :, None, None] + (K // 256 * 48 + chunk * 2)[:, None, None, None]
        at = (
            pairs + word[None, None, None, :],
            row[None, :, None] + (K // 256 * 52 + chunk // 2)[:, None, None],
        )
    elif KIND == "fp8":
        at = w_scale + (n // 128 * gl.cdiv(K, 128))[None, :, None]
    else:
        at = w_scale + n[None, :, None]
    return at


@gluon.jit
def load_scale(
    scales,
    chunk,
    step,
    N,
    K,
    KC: gl.constexpr,
    GROUP: gl.constexpr,
    KIND: gl.constexpr,
    EVEN: gl.constexpr,
    LF: gl.constexpr,
):
    """What GROUP inputs of a chunk share, [S, ROWS, PARTS or 1]: words (fp8: float32), of two
    groups of 32 each; Q4_K: the heads of the chunks' blocks, [S, ROWS, PARTS, 4]; Q6_K: two words
    of scales [S, ROWS, PARTS, 2], and the block's [S, ROWS, PARTS].

    Nibbles have 64 inputs in 32 bytes, of the first group in the low ones.
    """
    S: gl.constexpr = chunk.shape[0]
    part = gl.arange(
        0, LF.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LF)))
    )
    now = chunk + step * S
    if KIND == "q4_k":
        at = scales + (step * (S * 18) + 0 * part[None, None, :, None])
        if EVEN:
            found = gl.load(at)
        else:  # no head: its scales are zero
            found = gl.load(at, mask=(now * KC < K)[:, None, None, None], other=0)
    elif KIND == "q6_k":
        pairs, blocks = scales
        pairs += step * (S * 2) + 0 * part[None, None, :, None]
        blocks += step * (S // 2) + 0 * part[None, None, :]
        if EVEN:
            found = (gl.load(pairs), gl.load(blocks))
        else:
            mask = now * KC < K
            found = (
                gl.load(pairs, mask=mask[:, None, None, None], other=0),
                gl.load(blocks, mask=mask[:, None, None], other=0),
            )
    else:
        PER: gl.constexpr = 128 if KIND == "fp8" else (64 if GROUP == 32 else GROUP)
        STRIDE = 1 if KIND == "fp8" else N
        k = (now * KC)[:, None, None]
        if GROUP == 32 and KIND == "int4":
            k += 64 * part[None, None, :]
        if not EVEN:
            k = gl.minimum(k, K - 1)
        found = gl.load(scales + k // PER * STRIDE)
    return found


@gluon.jit
def q4_k_factors(heads, chunk, LS: gl.constexpr):
    """Scales and minimums [S, ROWS, PARTS] of the groups that a chunk has in its low nibbles, and
    of those in its high ones: a warp has the same half of each block."""
    S: gl.constexpr = heads.shape[0]
    ROWS: gl.constexpr = heads.shape[1]
    PARTS: gl.constexpr = heads.shape[2]
    even, odd = gl.split(heads.reshape([S, ROWS, PARTS, 2, 2]))
    d, b = gl.split(even)
    a, c = gl.split(odd)
    d, a = gl.convert_layout(d, LS), gl.convert_layout(a, LS)
    b, c = gl.convert_layout(b, LS), gl.convert_layout(c, LS)
    # Four groups' 6 bits in a word: the first four's as they are, the others' from three words.
    second = (chunk % 2)[:, None, None]
    shift = 2 * second
    upper = gl.where(second == 1, 0x30303030, 0x3F3F3F3F)
    lower = gl.where(second == 1, 0x0F0F0F0F, 0)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, None, :]
    scale = (((a >> shift) & upper) | (c & lower)) >> (16 * part)
    least = (((b >> shift) & upper) | ((c >> 4) & lower)) >> (16 * part)
    low, d = half(d >> 16), half(d)
    return (
        (d * number(scale), low * number(least)),
        (d * number(scale >> 8), low * number(least >> 8)),
    )


@gluon.jit
def q6_k_factors(scale, H: gl.constexpr, LS: gl.constexpr):
    """[S, ROWS, PARTS]: the scales of 16 inputs each that a chunk has in its low nibbles or in its
    high ones."""
    pairs, block = scale
    low, high = gl.split(pairs)
    word = gl.convert_layout(high if H == 1 else low, LS)
    part = gl.arange(0, pairs.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))
    byte = word << (24 - 8 * part)[None, None, :] >> 24
    return half(block) * byte.to(gl.float32)
