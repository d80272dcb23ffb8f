"""Q4_K's blocks for ``many_rows_hopper``: quants as int4's words, scales by the lanes (Gluon).

A block of 256 inputs is 36 words: two fp16, twelve bytes of eight scales and minimums of 6 bits,
and the quants, whose order is int4's. A weight is (q - 8) * s + (8 * s - m): q - 8 is exact in
bfloat16, and so little is left for the second term that rounding it costs nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .register_words import powers


def heads_layout(warps: int, rows: int) -> object:
    """[rows warps, 4]: each of four lanes has all of its warp's rows g (and, of 16 rows, g + 8)."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *([row, 0] for row in powers(8, rows))],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[row, 0] for row in powers(rows, rows * warps)],
        [],
        [rows * warps, 4],
    )


@gluon.jit
def load_heads(heads, step, STEPS):
    """The first 4 words of each row's block that has this step of 128 inputs, or the last one."""
    return gl.load(heads + gl.minimum(step, STEPS - 1) // 2 * 36)


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
    """Codes [ROWS, 16, 2, 2] less 8 -> weights."""
    s = gl.join(scale, scale)
    c = gl.join(offset, offset)
    return v * gl.join(s, s) + gl.join(c, c)
