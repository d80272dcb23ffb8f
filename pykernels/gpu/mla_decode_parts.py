"""How ``mla_decode_hopper`` leaves a part of a sequence, for ``mla_combine``: half floats by tiles.

The result of a part has 16 bits a value, times a power of two a row and half: twice as fast to
store, and to read again, as float32. The largest value of a half row lies between 2 ** 14 and
2 ** 15, so the error is at most 2 ** -11 of a value, an eighth of what rounding the result to bf16
adds, or 2 ** -39 of that largest one; no row is too large or too small.
A thread stores what it holds, 16 bytes a time, in the order in which its warp does so: the columns
of a line of 32 are not in their order. See ``mla_parts.TileParts`` for what lies where.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LINES = gl.constexpr(gl.BlockedLayout([16, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _stats(stats, NUMBER: gl.constexpr):
    """Where a part's rows have one of their three numbers."""
    tile = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    return stats + tile * 192 + NUMBER * 64


@gluon.jit
def store_lse(z, stats):
    """Base-2 log-sum-exps of a part's 64 rows."""
    gl.store(_stats(stats, 0) + gl.arange(0, 64, layout=z.type.layout), z)


@gluon.jit
def store_part(acc, inverse, parts, stats, SIDE: gl.constexpr):
    """``acc`` [64, 256] * ``inverse`` [64], a half of a part's result, as float16 and powers."""
    top = gl.max(gl.abs(acc), 1) * inverse
    power = gl.maximum(top.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (14 << 23)
    scale = ((254 << 23) - power).to(gl.float32, bitcast=True)  # the largest is 2 ** 14 then
    to = _stats(stats, 1 + SIDE) + gl.arange(0, 64, layout=power.type.layout)
    gl.store(to, power.to(gl.float32, bitcast=True))
    y = (acc * (inverse * scale)[:, None]).to(gl.float16)
    # A thread has of 8 lines (32 columns) and both halves of its warp's rows eight values each.
    y = gl.reshape(y, [4, 2, 8, 8, 4, 4, 2])  # warp, half, row, line, tile of 8, lane, pair
    y = gl.reshape(gl.permute(y, [0, 1, 3, 2, 5, 4, 6]), [64, 256])
    y = gl.convert_layout(y, LINES)  # as it lies
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    c = gl.arange(0, 256, layout=gl.SliceLayout(0, LINES))
    tile = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    gl.store(parts + (tile * 2 + SIDE) * 16384 + line[:, None] * 256 + c[None, :], y)
