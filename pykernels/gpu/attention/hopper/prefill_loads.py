"""Hopper's causal prefill: the order of its tiles, and the producer warps.

Tiles run from those with the most keys to those with the fewest, over so many heads at a time that
their keys stay in L2. Blocks of keys run from the diagonal to the first, so that only the first few
need a mask.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.gluon_compat import tma_load
from ...common.tile_scheduler import hand_out

STAGES = gl.constexpr(2)
"""Blocks of keys, and of values, that shared memory holds."""


@gluon.jit
def tile_at(
    tile,
    q_length_ptr,
    k_length_ptr,
    window,
    B,
    blocks,
    at_a_time,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """(sequence, head, first query, queries, keys, first block of keys, behind the last)."""
    head = tile % at_a_time
    at = tile // at_a_time
    b = at % B
    at = at // B
    head += at // blocks * at_a_time
    i = (blocks - 1 - at % blocks) * 128
    queries = gl.load(q_length_ptr + b)
    keys = gl.load(k_length_ptr + b)
    end = gl.minimum(keys, keys - queries + i + 128)  # behind the last key of any row
    hi = gl.where(i < queries, gl.cdiv(gl.maximum(end, 0), KEYS), 0)
    lo = 0
    if WINDOW:
        lo = gl.maximum(0, keys - queries + i + 1 - window) // KEYS
    return b, head, i, queries, keys, lo, hi


@gluon.jit
def _copy(
    desc, table, first_row, start, column, end, full, to, PAGE: gl.constexpr, KEYS: gl.constexpr
):
    """Begins the copy of ``KEYS`` keys or values from ``start`` on, a page or all at a time."""
    if PAGE > 0:
        PIECE: gl.constexpr = min(PAGE, KEYS)
        for j in gl.static_range(KEYS // PIECE):
            n = start + j * PIECE
            # Behind the end the last page again: those keys are masked.
            row = gl.load(table + gl.minimum(n, end - 1) // PAGE) * PAGE + n % PAGE
            tma_load(desc, [row, column], full, to.slice(j * PIECE, PIECE, dim=0))
    else:
        tma_load(desc, [first_row + start, column], full, to)


@gluon.jit
def _copy_keys(
    k_desc,
    kr_desc,
    table,
    first_row,
    start,
    column,
    end,
    ks,
    k_ropes,
    full,
    empty,
    c,
    PAGE: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    KEYS: gl.constexpr,
):
    stage = c % STAGES
    mbarrier.wait(empty.index(stage), (c // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), 2 * KEYS * (D + R))
    _copy(
        k_desc, table, first_row, start, column, end, full.index(stage), ks.index(stage), PAGE, KEYS
    )
    if R > 0:
        tma_load(kr_desc, [first_row + start, 0], full.index(stage), k_ropes.index(stage))


@gluon.jit
def _copy_values(
    v_desc,
    table,
    first_row,
    start,
    column,
    end,
    vs,
    full,
    empty,
    tail,
    c,
    PAGE: gl.constexpr,
    DV: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Behind the sequence's last key, zeros: NaN times 0 is NaN."""
    stage = c % STAGES
    mbarrier.wait(empty.index(stage), (c // STAGES & 1) ^ 1)
    v = vs.index(stage)
    left = end - start
    if left >= KEYS:
        mbarrier.expect(full.index(stage), 2 * KEYS * DV)
        _copy(v_desc, table, first_row, start, column, end, full.index(stage), v, PAGE, KEYS)
    else:
        mbarrier.expect(tail.index(0), 2 * KEYS * DV)
        _copy(v_desc, table, first_row, start, column, end, tail.index(0), v, PAGE, KEYS)
        mbarrier.wait(tail.index(0), 0)
        mbarrier.expect(tail.index(0), 0)  # back to phase 0
        mbarrier.wait(tail.index(0), 1)
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
        n = gl.arange(0, 16, layout=gl.SliceLayout(1, ROWS))[:, None]
        for r in gl.static_range(0, KEYS, 16):
            some = v.slice(r, 16)
            x = some.load(ROWS)
            some.store(gl.where(r + n < left, x, gl.zeros_like(x)))
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def producer(
    q_desc,
    qr_desc,
    k_desc,
    kr_desc,
    v_desc,
    q_start_ptr,
    q_length_ptr,
    k_start_ptr,
    k_length_ptr,
    table_ptr,
    table_stride,
    window,
    q_h,
    qr_h,
    k_h,
    v_h,
    B,
    blocks,
    tiles,
    at_a_time,
    counter_ptr,
    qs,
    q_ropes,
    ks,
    k_ropes,
    vs,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    tail,
    nexts,
    n_full,
    n_empty,
    PAGE: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    R: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """What the producer warps do."""
    c = 0
    t = 0
    n_tile = 0
    tile = gl.program_id(0)
    while tile < tiles:
        b, head, i, queries, keys, lo, hi = tile_at(
            tile, q_length_ptr, k_length_ptr, window, B, blocks, at_a_time, KEYS, WINDOW
        )
        q_row = gl.load(q_start_ptr + b) + i
        k_row = 0
        table = table_ptr
        if PAGE > 0:
            table += b.to(gl.int64) * table_stride
        else:
            k_row = gl.load(k_start_ptr + b)
        k_column = head // G * k_h
        v_column = head // G * v_h
        start = (hi - 1) * KEYS
        if lo < hi:
            mbarrier.wait(q_empty, t & 1 ^ 1)
            t += 1
            mbarrier.expect(q_full, 2 * 128 * (D + R))
            for wg in gl.static_range(2):
                q_at = q_row + 64 * wg
                tma_load(q_desc, [q_at, head * q_h], q_full, qs.index(wg))
                if R > 0:
                    tma_load(qr_desc, [q_at, head * qr_h], q_full, q_ropes.index(wg))
            _copy_keys(
                k_desc,
                kr_desc,
                table,
                k_row,
                start,
                k_column,
                keys,
                ks,
                k_ropes,
                k_full,
                k_empty,
                c,
                PAGE,
                D,
                R,
                KEYS,
            )
            for n in range(lo, hi):
                if n + 1 < hi:
                    _copy_keys(
                        k_desc,
                        kr_desc,
                        table,
                        k_row,
                        start - KEYS,
                        k_column,
                        keys,
                        ks,
                        k_ropes,
                        k_full,
                        k_empty,
                        c + 1,
                        PAGE,
                        D,
                        R,
                        KEYS,
                    )
                _copy_values(
                    v_desc,
                    table,
                    k_row,
                    start,
                    v_column,
                    keys,
                    vs,
                    v_full,
                    v_empty,
                    tail,
                    c,
                    PAGE,
                    DV,
                    KEYS,
                )
                start -= KEYS
                c += 1
                if n == lo:  # the buffers are full: there is time
                    tile = hand_out(counter_ptr, nexts, n_full, n_empty, n_tile, 4)
        else:
            tile = hand_out(counter_ptr, nexts, n_full, n_empty, n_tile, 4)
        n_tile += 1
