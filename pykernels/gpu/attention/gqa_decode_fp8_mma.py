"""Operands of ``mma.sync`` from E4M3 words, for ``gqa_decode_fp8`` (Gluon).

Keys and values of 128 elements are loaded 16 bytes a lane straight into the lanes whose products
take them, and dequantized to float16 there: nothing passes through shared memory. They are operand
A, so that 8 query rows fill a product (its N). A product may sum in any order on which both
operands agree:

- Scores [keys, rows] sum over D: lane 4 g + t has 16 bytes at 16 t and at 64 + 16 t of keys g,
  g + 8, ..., and the queries' elements are put in the same order.
- Values [D, rows] sum over keys: lane 4 g + t has 16 bytes at 16 g of keys 2 t, 2 t + 1, 2 t + 8,
  ..., and probabilities are transposed, 8 x 8 in an instruction. The result's rows are put in
  order at the end.

The first dimension of every tensor is the warps'.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.dequant_mma import powers
from .online_softmax import half_scale


def layouts(num_warps: int, keys: int) -> tuple[object, object]:
    """(int32 of keys, of values) [warps, keys, 32] as the products want them."""
    of_warps = [[warp, 0, 0] for warp in powers(1, num_warps)]
    others = [[0, n, 0] for n in powers(8, keys)]
    in_key = gl.DistributedLinearLayout(
        [[0, 0, n] for n in (1, 2, 16)] + others,
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        of_warps,
        [],
        [num_warps, keys, 32],
    )
    in_value = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], *others],
        [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        of_warps,
        [],
        [num_warps, keys, 32],
    )
    return in_key, in_value


@gluon.jit
def half_pair(bits):
    """int32 -> the float16 of its low half, that of its high half."""
    low = bits.to(gl.int16).to(gl.float16, bitcast=True)
    high = (bits >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return low, high


@gluon.jit
def e4m3_pairs(word):
    """Four E4M3 as two pairs of float16: exact, an instruction a pair."""
    return gl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
        "=r,=r,r",
        [word],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def e4m3_pairs_interleaved(even, odd):
    """Bytes 0 to 3 of two words, each beside the other word's, as pairs of float16."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 x, y; .reg .b16 a, b, c, d;"
        " prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;"
        " mov.b32 {a, b}, x; mov.b32 {c, d}, y;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
        " cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d;}",
        "=r,=r,=r,=r,r,r",
        [even, odd],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def transposed_pairs(even, odd):
    """Two float32 a lane -> a pair of float16; of 8 x 8 of these, in a warp, the transpose.

    Lane 4 g + t gives row g, columns 2 t and 2 t + 1, and gets column g, rows 2 t and 2 t + 1.
    """
    return gl.inline_asm_elementwise(
        "{.reg .b32 x; cvt.rn.f16x2.f32 x, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, x;}",
        "=r,f,f",
        [even, odd],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def log2(x):
    """Base-2 logarithm of normal numbers, to 2 ** -22 of them: one instruction."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def joined(bits):
    low, high = half_pair(bits)
    return gl.join(low, high)


@gluon.jit
def key_operand(words, A: gl.constexpr):
    """[W, N, 32] -> operand A [W, N, 128], D in the order of ``query_operand``."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    low, high = e4m3_pairs(words)
    x = gl.join(joined(low), joined(high))  # .., bit 0 of d, bit 1
    x = x.reshape([W, N, 2, 4, 4, 2, 2]).permute([0, 1, 2, 4, 6, 3, 5])
    return gl.convert_layout(x.reshape([W, N, 128]), A)


@gluon.jit
def query_operand(q, B: gl.constexpr):
    """[W, ROWS, 128] -> operand B [W, 128, ROWS], D in the order of ``key_operand``."""
    W: gl.constexpr = q.shape[0]
    ROWS: gl.constexpr = q.shape[1]
    x = q.reshape([W, ROWS, 2, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1])
    return gl.convert_layout(x.reshape([W, 128, ROWS]), B)


@gluon.jit
def value_operand(words, A: gl.constexpr):
    """[W, N, 32] -> operand A [W, 128, N], D in the order that ``unpermute_columns`` undoes."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    even, odd = gl.split(words.reshape([W, N // 2, 2, 32]).permute([0, 1, 3, 2]))
    a, b, c, d = e4m3_pairs_interleaved(even, odd)
    x = gl.join(gl.join(joined(a), joined(b)), gl.join(joined(c), joined(d)))
    x = x.reshape([W, N // 2, 8, 4, 2, 2, 2]).permute([0, 3, 6, 5, 2, 1, 4])
    return gl.convert_layout(x.reshape([W, 128, N]), A)


@gluon.jit
def unpermute_columns(acc):
    """[128, ROWS] sums of ``value_operand`` -> [ROWS, 128]."""
    ROWS: gl.constexpr = acc.shape[1]
    return acc.reshape([16, 8, ROWS]).permute([2, 1, 0]).reshape([ROWS, 128])


@gluon.jit
def p_operand(p, B: gl.constexpr):
    """[W, N, ROWS] float32 as scores lie -> float16 as operand B."""
    W: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    ROWS: gl.constexpr = p.shape[2]
    even, odd = gl.split(p.reshape([W, N, ROWS // 2, 2]))
    x = joined(transposed_pairs(even, odd)).reshape([W, N // 8, 8, ROWS // 8, 4, 2])
    return gl.convert_layout(x.permute([0, 1, 4, 5, 3, 2]).reshape([W, N, ROWS]), B)


@gluon.jit
def half_rows(x):
    """``online_softmax.half_rows`` of [W, ROWS, 128]."""
    power, inverse = half_scale(gl.max(gl.abs(x.to(gl.float32)), 2))
    return (x.to(gl.float32) * inverse[:, :, None]).to(gl.float16), power


@gluon.jit
def pages_of(table, start, end, w, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """The page of each warp's keys from ``start`` on, [W]."""
    at = start + w * KEYS
    return gl.load(table + at // PAGE, mask=at < end, other=0)


@gluon.jit
def first_rows(page, start, w, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Row in the cache of each warp's first key, int64 [W]."""
    return page.to(gl.int64) * PAGE + (start + w * KEYS) % PAGE


@gluon.jit
def key_words(ptrs, page, start, w, TOKEN: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Behind the end whatever the cache holds: those scores are masked."""
    at = first_rows(page, start, w, KEYS, PAGE) * TOKEN
    return gl.load(ptrs + at[:, None, None])


@gluon.jit
def value_words(
    ptrs, page, start, end, w, n, TOKEN: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr
):
    """Zeros behind the end."""
    at = first_rows(page, start, w, KEYS, PAGE) * TOKEN
    valid = n[None, :] < (end - start - w * KEYS)[:, None]
    return gl.load(ptrs + at[:, None, None], mask=valid[:, :, None], other=0)
