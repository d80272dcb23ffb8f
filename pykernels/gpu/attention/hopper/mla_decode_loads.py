"""What comes into shared memory for ``mla_decode_hopper``: queries, and the producer's blocks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_compat import barrier, tma_load
from ..online_softmax import find_split, split_range
from .split_kv import load_lengths

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 columns


@gluon.jit
def split_of_cta(length_ptr, B, S, total_splits, SPLIT: gl.constexpr, BATCH: gl.constexpr):
    """What a CTA does: (sequence, its length, first key, the key behind the last, blocks).

    No blocks: nothing; the split is of no sequence, or the sequence is empty.
    """
    split_idx = gl.program_id(1)
    b, split, num_splits = split_idx, 0, 1
    if SPLIT:
        i, lengths = load_lengths(length_ptr, B, BATCH, 4)
        b, length, split, num_splits = find_split(
            i, lengths, split_idx, B, total_splits, S, 0, 64, False
        )
    else:
        length = gl.load(length_ptr + b)
    begin, end = split_range(0, length, split, num_splits, 64, True)
    blocks = gl.maximum(gl.cdiv(end - begin, 64), 0)
    if SPLIT:
        blocks = gl.where(num_splits > 0, blocks, 0)
    return b.to(gl.int64), length, begin, end, blocks


@gluon.jit
def query_rows(
    base, row, rows, NH, s_stride, h_stride, WIDTH: gl.constexpr, MULTI_TOKEN: gl.constexpr
):
    """64 query rows of ``WIDTH`` columns in registers, zeros behind the last row.

    All of it is loaded at once: it is the first that a CTA waits for.
    """
    row += gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE))
    if MULTI_TOKEN:
        at = base + (row // NH).to(gl.int64) * s_stride + (row % NH) * h_stride
    else:
        at = base + row.to(gl.int64) * h_stride
    return gl.load(at[:, None] + c[None, :], mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def zeros_behind(values, keys):
    """Zeros in the rows of a half block that hold no keys: the cache may hold NaN."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    for i in gl.static_range(4):
        columns = values.slice(i * 64, 64, dim=1)
        x = columns.load(TILE)
        columns.store(gl.where((n < keys)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()  # the tensor cores read through another path than threads write
    barrier()


@gluon.jit
def producer(
    latent,
    rope,
    scale_ptr,
    table_ptr,
    table_stride,
    length_ptr,
    B,
    S,
    total_splits,
    k_left,
    k_right,
    k_rope,
    k_scale,
    left_full,
    right_full,
    left_empty,
    right_empty,
    COLUMNS: gl.constexpr,
    L: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    BATCH: gl.constexpr,
):
    """Copies the keys into shared memory: the left half with the rotated part, then the right.

    Every COLUMNS have a memory barrier: scores begin with those that have arrived.
    """
    gdc_wait()  # it may be launched while the kernel before it still runs
    gdc_launch_dependents()  # the combining kernel waits by itself
    b, _, begin, end, blocks = split_of_cta(length_ptr, B, S, total_splits, SPLIT, BATCH)
    table = table_ptr + b * table_stride
    last = end - 1
    following = gl.load(table + begin // PAGE, mask=blocks > 0, other=0)
    for i in range(blocks):
        stage, phase = i & 1, (i >> 1) & 1
        start = begin + i * 64
        here = following
        following = gl.load(table + gl.minimum(start + 64, last) // PAGE)
        mbarrier.wait(left_empty.index(stage), phase ^ 1)
        _copy_half(
            latent,
            table,
            here,
            start,
            last,
            0,
            k_left.index(stage),
            left_full,
            stage,
            rope,
            k_rope.index(stage),
            COLUMNS,
            PAGE,
        )
        mbarrier.wait(right_empty.index(stage), phase ^ 1)
        _copy_half(
            latent,
            table,
            here,
            start,
            last,
            256,
            k_right.index(stage),
            right_full,
            stage,
            None,
            None,
            COLUMNS,
            PAGE,
        )


@gluon.jit
def _copy_half(
    latent,
    table,
    page,
    start,
    last,
    column,
    half,
    full,
    stage,
    rope,
    k_rope,
    COLUMNS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Begins the copies of half a block of keys, the rotated part with the first COLUMNS."""
    PIECES: gl.constexpr = 256 // COLUMNS
    TALL: gl.constexpr = min(PAGE, 64)  # rows of a copy
    for c in gl.static_range(PIECES):
        if c == 0 and rope is not None:
            mbarrier.expect(full.index(stage * PIECES + c), 64 * (COLUMNS + 64) * 2)
        else:
            mbarrier.expect(full.index(stage * PIECES + c), 64 * COLUMNS * 2)
    for j in gl.static_range(64 // TALL):
        if TALL < 64:  # behind the end the last page again: those keys' p is zero
            page = gl.load(table + gl.minimum(start + j * TALL, last) // PAGE)
        row = page * PAGE + (start + j * TALL) % PAGE
        rows = half.slice(j * TALL, TALL, dim=0)
        if rope is not None:
            tma_load(
                rope, [row, 0], full.index(stage * PIECES), k_rope.slice(j * TALL, TALL, dim=0)
            )
        for c in gl.static_range(PIECES):
            to = rows.slice(c * COLUMNS, COLUMNS, dim=1)
            tma_load(latent, [row, column + c * COLUMNS], full.index(stage * PIECES + c), to)
