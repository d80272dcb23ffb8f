"""What comes into shared memory for ``mla_decode_hopper``: queries, blocks of keys, shares."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_compat import barrier, tma_load
from .split_kv import share_of_slot

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 columns


@gluon.jit
def share(length_ptr, B, S, slots, SPLIT: gl.constexpr, BATCH: gl.constexpr):
    """What a program does: (sequence, its length, first key, the key behind the last, blocks).

    No blocks: nothing; the slot is of no sequence, or the sequence is empty.
    """
    slot = gl.program_id(1)
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(
            length_ptr, slot, B, slots, S, 0, 64, BATCH, 4, False
        )
    else:
        length = gl.load(length_ptr + b)
    each = gl.cdiv(gl.cdiv(length, 64), gl.maximum(parts, 1)) * 64
    begin = part * each
    end = gl.minimum(length, begin + each)
    blocks = gl.maximum(gl.cdiv(end - begin, 64), 0)
    if SPLIT:
        blocks = gl.where(parts > 0, blocks, 0)
    return b.to(gl.int64), length, begin, end, blocks


@gluon.jit
def query_rows(base, row, rows, NH, s_stride, h_stride, WIDTH: gl.constexpr, MANY: gl.constexpr):
    """64 query rows of ``WIDTH`` columns in registers, zeros behind the last row.

    All of it is asked for at once: it is the first that a program waits for.
    """
    row += gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE))
    if MANY:
        at = base + (row // NH).to(gl.int64) * s_stride + (row % NH) * h_stride
    else:
        at = base + row.to(gl.int64) * h_stride
    return gl.load(at[:, None] + c[None, :], mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def zeros_behind(values, keys):
    """Zeros in the rows of a half block that hold no keys: there may be NaN there."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    for i in gl.static_range(4):
        part = values.slice(i * 64, 64, dim=1)
        x = part.load(TILE)
        part.store(gl.where((n < keys)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()  # the tensor cores read through another path than threads write
    barrier()


@gluon.jit
def copies(
    latent, rope, scale_ptr, table_ptr, table_stride, length_ptr, B, S, slots, k_left, k_right,
    k_rope, k_scale, left_full, right_full, left_empty, right_empty,
    COLUMNS: gl.constexpr, L: gl.constexpr, PAGE: gl.constexpr, SPLIT: gl.constexpr,
    BATCH: gl.constexpr,
):  # fmt: skip
    """The keys' way into shared memory: the left half with the rotated part, then the right.

    COLUMNS of them have a memory barrier: scores begin with those that are there.
    """
    gdc_wait()  # it may be launched while the kernel before it still runs
    gdc_launch_dependents()  # the combining kernel waits by itself
    b, _, begin, end, blocks = share(length_ptr, B, S, slots, SPLIT, BATCH)
    table = table_ptr + b * table_stride
    last = end - 1
    following = gl.load(table + begin // PAGE, mask=blocks > 0, other=0)
    for i in range(blocks):
        turn, phase = i & 1, (i >> 1) & 1
        start = begin + i * 64
        here = following
        following = gl.load(table + gl.minimum(start + 64, last) // PAGE)
        mbarrier.wait(left_empty.index(turn), phase ^ 1)
        _copies_of_half(
            latent, table, here, start, last, 0, k_left.index(turn), left_full, turn,
            rope, k_rope.index(turn), COLUMNS, PAGE,
        )  # fmt: skip
        mbarrier.wait(right_empty.index(turn), phase ^ 1)
        _copies_of_half(
            latent, table, here, start, last, 256, k_right.index(turn), right_full, turn,
            None, None, COLUMNS, PAGE,
        )  # fmt: skip


@gluon.jit
def _copies_of_half(
    latent, table, page, start, last, column, half, full, turn, rope, k_rope,
    COLUMNS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Begins the copies of half a block of keys, the rotated part with the first COLUMNS."""
    PIECES: gl.constexpr = 256 // COLUMNS
    TALL: gl.constexpr = min(PAGE, 64)  # rows of a copy
    for c in gl.static_range(PIECES):
        if c == 0 and rope is not None:
            mbarrier.expect(full.index(turn * PIECES + c), 64 * (COLUMNS + 64) * 2)
        else:
            mbarrier.expect(full.index(turn * PIECES + c), 64 * COLUMNS * 2)
    for j in gl.static_range(64 // TALL):
        if TALL < 64:  # behind the end the last page again: its shares are zero
            page = gl.load(table + gl.minimum(start + j * TALL, last) // PAGE)
        row = page * PAGE + (start + j * TALL) % PAGE
        rows = half.slice(j * TALL, TALL, dim=0)
        if rope is not None:
            tma_load(rope, [row, 0], full.index(turn * PIECES), k_rope.slice(j * TALL, TALL, dim=0))
        for c in gl.static_range(PIECES):
            to = rows.slice(c * COLUMNS, COLUMNS, dim=1)
            tma_load(latent, [row, column + c * COLUMNS], full.index(turn * PIECES + c), to)
