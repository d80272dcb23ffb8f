"""Split-KV of ``mla_decode_hopper``: how a split's result is stored, and the kernel that combines.

A split's result has 16 bits a value, times a power of two a row and half: twice as fast to store,
and to load again, as float32. The largest value of a half row lies between 2 ** 14 and 2 ** 15, so
the error is at most 2 ** -11 of a value, an eighth of what rounding the result to bf16 adds, or
2 ** -39 of that largest one; no row is too large or too small.
A thread stores what it holds, 16 bytes a time, in the order in which its warp does so: the columns
of a line of 32 are permuted. ``attention.mla_split_kv.TilePartials`` says where each value is.

The splits are weighed by their log-sum-exps, as in FlashDecoding.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..online_softmax import count_splits, half_scale
from .split_kv import load_lengths

LINES = gl.constexpr(gl.BlockedLayout([16, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _stats(stats, NUMBER: gl.constexpr):
    """Where a split's rows have one of their three numbers."""
    tile = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    return stats + tile * 192 + NUMBER * 64


@gluon.jit
def store_lse(z, stats):
    """Base-2 log-sum-exps of a split's 64 rows."""
    gl.store(_stats(stats, 0) + gl.arange(0, 64, layout=z.type.layout), z)


@gluon.jit
def store_split(acc, inverse, partials, stats, SIDE: gl.constexpr):
    """``acc`` [64, 256] * ``inverse`` [64], a half of a split's result, as float16 and powers."""
    power, scale = half_scale(gl.max(gl.abs(acc), 1) * inverse)
    gl.store(_stats(stats, 1 + SIDE) + gl.arange(0, 64, layout=power.type.layout), power)
    y = (acc * (inverse * scale)[:, None]).to(gl.float16)
    # A thread has of 8 lines (32 columns) and both halves of its warp's rows eight values each.
    y = gl.reshape(y, [4, 2, 8, 8, 4, 4, 2])  # warp, half, row, line, tile of 8, lane, pair
    y = gl.reshape(gl.permute(y, [0, 1, 3, 2, 5, 4, 6]), [64, 256])
    y = gl.convert_layout(y, LINES)  # as it is stored
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    c = gl.arange(0, 256, layout=gl.SliceLayout(0, LINES))
    tile = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    gl.store(partials + (tile * 2 + SIDE) * 16384 + line[:, None] * 256 + c[None, :], y)


WARPS = 16
"""With their registers they fill an SM with one CTA: the SMs that the decode kernel left idle
would otherwise take more than the others before it ends."""
LINES_SPLITS = 128
"""Lines times splits of a CTA: 64 KiB, all loaded at once, 16 bytes a thread and split."""
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 2], [1, 0]))  # of the result


@gluon.jit(do_not_specialize=["B", "total_splits"])  # a batch's size compiles nothing new
def mla_combine(
    partials_ptr,
    stats_ptr,
    out,
    length_ptr,
    B,
    R,
    tiles,
    total_splits,
    S,
    LINES: gl.constexpr,
    BLOCK: gl.constexpr,
    BATCH: gl.constexpr,
):
    """8 rows of a sequence, LINES times 32 columns of them: the weighed sum of all splits."""
    ACROSS: gl.constexpr = 16 // LINES  # warps that divide a line's splits
    X: gl.constexpr = gl.BlockedLayout(
        [BLOCK // ACROSS, 1, 1, 8], [1, 1, 8, 4], [ACROSS, LINES, 1, 1], [3, 2, 1, 0]
    )
    STATS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [16, 1], [1, 0])  # as loaded
    X_ROW: gl.constexpr = gl.SliceLayout(3, X)  # [splits, lines, rows]
    Z: gl.constexpr = gl.SliceLayout(1, X_ROW)  # [splits, rows]
    SPOT: gl.constexpr = gl.SliceLayout(0, X)  # [lines, rows, 32]
    V: gl.constexpr = max(1, 8 // ACROSS)  # values of the result a thread
    SHARED: gl.constexpr = gl.BlockedLayout(  # [warps of a line, lines, rows, 32]
        [ACROSS, 1, 1, V], [1, 1, V, 32 // V], [1, LINES, ACROSS, 1], [3, 2, 1, 0]
    )
    Y: gl.constexpr = gl.SliceLayout(0, SHARED)
    b, group = gl.program_id(0) // (tiles * 8), gl.program_id(0) % (tiles * 8)
    tile, within = group // 8, group % 8
    i, lengths = load_lengths(length_ptr, B, BATCH, 16)
    num_splits, start = count_splits(i, lengths, B, total_splits, S, 0, 64, False)
    first = gl.sum(gl.where(i == b, start, 0), 0)
    behind = first + gl.sum(gl.where(i == b, num_splits, 0), 0)

    line = gl.program_id(1) * LINES + gl.arange(
        0, LINES, layout=gl.SliceLayout(1, gl.SliceLayout(2, SPOT))
    )
    spot = (line // 8 * 64 + within * 8 + line % 8) * 256
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, SPOT)))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, SPOT)))
    spot = spot[:, None, None] + (r * 32)[None, :, None] + c[None, None, :]
    left = gl.arange(0, LINES, layout=gl.SliceLayout(0, gl.SliceLayout(2, X_ROW)))
    left = gl.program_id(1) * LINES + left < 8
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, STATS))
    n_x = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, STATS))
    m_i = gl.full([8], float("-inf"), gl.float32, layout=gl.SliceLayout(0, STATS))
    l_i = gl.full([8], 0.0, gl.float32, layout=gl.SliceLayout(0, STATS))
    acc = gl.full([LINES, 8, 32], 0.0, gl.float32, layout=Y)
    if behind >= 0:  # always; else the compiler puts all of this behind the wait
        gdc_wait()  # until the splits are done
    gdc_launch_dependents()
    for begin in range(first, behind, BLOCK):
        at = (begin + n_x).to(gl.int64) * (tiles * 32768) + tile * 32768
        at = gl.expand_dims(gl.expand_dims(at[:, None], 2), 3)
        mask = gl.expand_dims(gl.expand_dims((begin + n_x < behind)[:, None], 2), 3)
        x = gl.load(partials_ptr + at + gl.expand_dims(spot, 0), mask=mask, other=0.0)
        stats = stats_ptr + ((begin + n) * tiles + tile).to(gl.int64)[:, None] * 192
        stats += within * 8 + r[None, :]
        mask = (begin + n < behind)[:, None]
        z = gl.load(stats, mask=mask, other=float("-inf"))
        power_left = gl.load(stats + 64, mask=mask, other=0.0)
        power_right = gl.load(stats + 128, mask=mask, other=0.0)
        # Now warps meet at a barrier, and so all loads are on their way.
        m_new = gl.maximum(m_i, gl.max(z, 0))
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        w = gl.exp2(z - base[None, :])
        alpha = gl.exp2(m_i - base)
        l_i = l_i * alpha + gl.sum(w, 0)
        m_i = m_new
        w_left = gl.convert_layout(w * power_left, Z)
        w_right = gl.convert_layout(w * power_right, Z)
        w = gl.where(left[None, :, None], gl.expand_dims(w_left, 1), gl.expand_dims(w_right, 1))
        w = gl.expand_dims(w, 3)
        # An empty split wrote neither values nor powers: its weight is NaN, or 0.
        # It is left out here, not in the load, which would wait.
        x = gl.where(w > 0, x.to(gl.float32) * w, 0.0)
        # Not one sum: that goes through shared memory with all lanes of a warp in a bank or two.
        x = gl.sum(gl.reshape(x, [ACROSS, BLOCK // ACROSS, LINES, 8, 32]), 1)
        acc = acc * _of_rows(alpha, Y) + gl.sum(gl.convert_layout(x, SHARED), 0)
    y = acc * _of_rows(1 / gl.where(l_i == 0, 1.0, l_i), Y)
    y = gl.reshape(y.to(gl.bfloat16), [LINES, 8, 4, 4, 2])  # line, row, lane, tile of 8, pair
    y = gl.reshape(gl.permute(y, [1, 0, 3, 2, 4]), [8, LINES * 32])
    y = gl.convert_layout(y, ROWS)
    row = tile * 64 + within * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    c = gl.program_id(1) * (LINES * 32)
    c += gl.arange(0, LINES * 32, layout=gl.SliceLayout(0, ROWS))
    to = out + ((b.to(gl.int64) * R) + row)[:, None] * 512 + c[None, :]
    gl.store(to, y, mask=(row < R)[:, None])


@gluon.jit
def _of_rows(x, Y: gl.constexpr):
    """``x`` [8] beside [lines, 8, 32]."""
    x = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(2, Y)))
    return x[None, :, None]
