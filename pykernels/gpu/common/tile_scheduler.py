"""Persistent programs on Hopper: the first that is done takes the next tile.

Tiles begin in their order, so that those that read the same weights run at the same time and one
of them brings the weights into L2 for all. With a static schedule, programs drift apart
and read the weights again from memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

NUMBER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
"""The layout of the shared memory through which a tile's number goes."""


@gluon.jit
def blocks_of(tiles, bound):
    """Blocks of 128 rows; without a table all ``bound`` rows have one matrix."""
    if tiles is None:
        return gl.cdiv(bound, 128)
    else:
        return gl.load(tiles + 4 * bound)


@gluon.jit
def tile_at(tiles, bound, t, blocks, N_BLOCKS, GROUP_M: gl.constexpr):
    """(expert, first row, row behind its last, N block) of tile ``t``; zeros behind all."""
    mask = t < blocks * N_BLOCKS
    group = t // (GROUP_M * N_BLOCKS)
    inside = t % (GROUP_M * N_BLOCKS)
    rows = gl.maximum(gl.minimum(blocks - group * GROUP_M, GROUP_M), 1)
    block = group * GROUP_M + inside % rows
    if tiles is None:
        expert = 0
        first = gl.where(mask, block * 128, 0)
        hi = gl.where(mask, bound, 0)
    else:
        line = tiles + 4 * block
        expert = gl.load(line, mask=mask, other=0)
        first = gl.load(line + 1, mask=mask, other=0)
        hi = gl.load(line + 2, mask=mask, other=0)
    return expert, first, hi, inside // rows


@gluon.jit
def hand_out(counter, nexts, full, empty, turn, WARPS: gl.constexpr):
    """Takes the next tile and tells the other warps; for the ``WARPS`` warps that copy."""
    to = turn & 1
    taken = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(empty.index(to), (turn >> 1 & 1) ^ 1)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    nexts.index(to).store(gl.full([1], 0, gl.int64, layout=L) + taken)
    mbarrier.arrive(full.index(to), count=1)
    return taken


@gluon.jit
def handed_out(nexts, full, empty, turn):
    """The tile that the copying warps took; for four warps."""
    to = turn & 1
    mbarrier.wait(full.index(to), turn >> 1 & 1)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    taken = gl.max(nexts.index(to).load(L), 0).to(gl.int32)
    mbarrier.arrive(empty.index(to), count=1)
    return taken


@gluon.jit
def take_next(tiles, bound, t, nexts, full, empty, turn):
    """Takes the tile after ``t`` and tells the other warps; for the one warp that copies.

    One matrix is read often and stays in L2: without a table tiles are dealt out beforehand.
    """
    if tiles is None:
        return t + gl.num_programs(0)
    else:
        return hand_out(tiles + 4 * bound + 1, nexts, full, empty, turn, 1)


@gluon.jit
def next_taken(tiles, t, nexts, full, empty, turn):
    """The tile that the copying warp took after ``t``; for four warps."""
    if tiles is None:
        return t + gl.num_programs(0)
    else:
        return handed_out(nexts, full, empty, turn)


@gluon.jit
def store_tile(y, out, first, hi, n0, N, WIDE: gl.constexpr):
    """Rows of a [64, 128] tile; through shared memory, so that stores are whole."""
    y = gl.convert_layout(y, WIDE)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    col = n0 + gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))
    at = out + (row.to(gl.int64) * N)[:, None] + col[None, :]
    gl.store(at, y, mask=(row < hi)[:, None] & (col < N)[None, :])


@gluon.jit
def to_bf16(x):
    """float32 -> bfloat16, to nearest even: one instruction for two."""
    return x.to(gl.bfloat16)
