"""K-quants for ``dequant_gemm``: the words that copies do not bring, read by the lanes (Gluon).

``number`` and ``half`` serve ``gemv_mma`` too.

A block of Q4_K, 256 inputs, is 36 words: two fp16, twelve bytes of eight scales and minimums of 6
bits (its head), and the quants, whose order is int4's. A weight is (q - 8) * s + (8 * s - m): q - 8
is exact in bfloat16, and so little is left for the second term that rounding it costs nothing.

A row of Q6_K lies in parts (see ``gemm.weights``). Copies bring the nibbles; two more bits of each,
an int8 scale for 16 inputs and an fp16 for 256 are the head of a step. Of 16 words a lane's four
are inputs 16 t .. in their low halves and 64 + 16 t .. in their high ones: of one scale each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.dequant_mma import pair, powers


def heads_layout(num_warps: int, rows: int) -> object:
    """[rows warps, 4]: each of four lanes has all of its warp's rows g (and, of 16 rows, g + 8)."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *([row, 0] for row in powers(8, rows))],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[row, 0] for row in powers(rows, rows * num_warps)],
        [],
        [rows * num_warps, 4],
    )


@gluon.jit
def row_starts(w, row, BLOCKS, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """Where rows begin: pointers, of Q4_K [ROWS, 4] to the first head."""
    if KIND == "q4_k":
        at = row.to(gl.int64) * (BLOCKS * 36)
        return w + at[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    else:
        return w + row.to(gl.int64) * (BLOCKS * 4)


@gluon.jit
def load_heads(heads, step, STEPS, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """Heads of each row's step of 128 inputs, or the last one. Q4_K: [ROWS, 4]; Q6_K: high bits
    [ROWS, 16] (each word twice), two words of scales and the fp16 one."""
    step = gl.minimum(step, STEPS - 1)
    if KIND == "q4_k":  # copies have brought these to L2
        return gl.load(heads + step // 2 * 36)
    else:
        word = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT)) % 8
        high = gl.load(heads[:, None] + (STEPS * 16 + step * 8) + word[None, :])
        scales = heads + (STEPS * 24 + step * 2)
        d = gl.load(heads + (STEPS * 26 + step // 2))
        return high, gl.load(scales), gl.load(scales + 1), d


@gluon.jit
def unpack_heads(heads, words, step, KIND: gl.constexpr):
    """Q4_K: ``group_scales``; Q6_K: scales [ROWS, 16] of low halves and high ones, and the high
    bits, shifted as lanes need them."""
    if KIND == "q4_k":
        return group_scales(heads, words, step)
    else:
        WORDS: gl.constexpr = words.type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, WORDS)
        high, low, second, d = heads
        high = gl.convert_layout(high, WORDS)
        low = gl.convert_layout(low, ROW)[:, None]
        second = gl.convert_layout(second, ROW)[:, None]
        d = half(gl.convert_layout(d, ROW))[:, None]
        word = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
        shift = (24 - word // 4 * 8)[None, :]
        s0 = to_bf16(d * (low << shift >> 24).to(gl.float32))
        s1 = to_bf16(d * (second << shift >> 24).to(gl.float32))
        return s0, s1, high >> (word // 8 * 2)[None, :]


@gluon.jit
def six_bits(words, high, MAGIC):
    """Nibbles at bits 0 and 16, two more bits at 4 and 20 -> [.., 2]: codes less 32."""
    low, up = pair((words & 0x000F000F) | (high & 0x00300030) | MAGIC)
    return gl.join(low - 160.0, up - 160.0)


@gluon.jit
def q6_k_codes(words, high, MAGIC, H: gl.constexpr):
    """As ``dequant_mma.codes``, of product H of a step."""
    if H == 0:
        return gl.join(six_bits(words, high << 4, MAGIC), six_bits(words >> 8, high >> 4, MAGIC))
    else:
        return gl.join(six_bits(words, high, MAGIC), six_bits(words >> 8, high >> 8, MAGIC))


@gluon.jit
def number(bits):
    """An integer of 6 bits as float32, by the low bits of 2**23."""
    return (bits & 63 | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def half(bits):
    """The low 16 bits as fp16 -> float32."""
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def to_bf16(x):
    return x.to(gl.bfloat16)


@gluon.jit
def factors(d, least, scale, minimum):
    """(s, 8 s - m) in bfloat16."""
    s = d * number(scale)
    return to_bf16(s), to_bf16(8.0 * s - least * number(minimum))


@gluon.jit
def group_scales(heads, words, step):
    """``factors`` [ROWS, 16] of the groups that this step's words have in their low halves and in
    their high ones."""
    ROWS: gl.constexpr = heads.shape[0]
    WORDS: gl.constexpr = words.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, WORDS)
    even, odd = gl.split(heads.reshape([ROWS, 2, 2]))
    d, b = gl.split(even)
    a, c = gl.split(odd)
    # Four groups' 6 bits in a word: the first four's as they are, the others' from three words.
    second = step % 2 == 1
    scale = gl.where(second, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030), a & 0x3F3F3F3F)
    minimum = gl.where(second, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030), b & 0x3F3F3F3F)
    # Words 0 .. 7 have the first two of these groups, the others the last two.
    own = (gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS)) // 8 * 16)[None, :]
    scale = gl.convert_layout(scale, ROW)[:, None] >> own
    minimum = gl.convert_layout(minimum, ROW)[:, None] >> own
    least = gl.convert_layout(half(d >> 16), ROW)[:, None]
    d = gl.convert_layout(half(d), ROW)[:, None]
    s0, c0 = factors(d, least, scale, minimum)
    s1, c1 = factors(d, least, scale >> 8, minimum >> 8)
    return s0, c0, s1, c1


@gluon.jit
def weighted(v, scale, offset):
    """Codes [ROWS, 16, 2, 2] times a scale, and an offset."""
    s = gl.join(scale, scale)
    v = v * gl.join(s, s)
    if offset is not None:
        c = gl.join(offset, offset)
        v += gl.join(c, c)
    return v
