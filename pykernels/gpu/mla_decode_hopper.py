"""Absorbed MLA decode written out for Hopper: 64 rows and 64 keys a step, warps with roles.

The same function as ``mla_decode``'s Triton kernel, in Gluon. The result of 64 rows is half of an
SM's registers, so two warpgroups hold half of its columns each, and there is no room for a second.
One warpgroup (``_left``) computes all scores and shares and the left half of the values, the other
(``_right``) the right half, a step behind: the tensor cores have its product while the first takes
exponentials. One warp (``_copies``) keeps the copies of the tensor memory
accelerator going, half a block at a time as halves become free. Both warpgroups' results are scaled
by the same factors, which, like the shares, go through shared memory.

A block of keys is its values too; blocks are in two buffers (144 KiB, beside 72 of queries). What
an E4M3 cache changes is in ``mla_decode_e4m3``.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import barrier, reinterpret, tma_load
from .gluon_share import share_of_slot
from .mla_decode_e4m3 import decoded, half_queries, scaled_softmax

ROWS = KEYS = 64
WARPS = 4
REGISTERS = 168
"""A thread, as launched: of the whole SM's, for three warpgroups. The roles then share them out."""
RIGHT_REGISTERS, COPY_REGISTERS = gl.constexpr(208), gl.constexpr(48)  # 248 are left for _left
RIGHT_E4M3_REGISTERS, DECODE_REGISTERS = gl.constexpr(184), gl.constexpr(72)

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 columns
FLAT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
LINES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # float32
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # one dimension


@gluon.jit
def _queries(base, row, rows, NH, s_stride, h_stride, to, WIDTH: gl.constexpr):
    """64 query rows into shared memory, 64 columns at a time, zeros behind the last row."""
    row += gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, TILE))
    at = base + (row // NH).to(gl.int64) * s_stride + (row % NH) * h_stride
    for i in gl.static_range(WIDTH // 64):
        x = gl.load(at[:, None] + (i * 64 + c)[None, :], mask=(row < rows)[:, None], other=0.0)
        to.slice(i * 64, 64, dim=1).store(x)


@gluon.jit
def _zeros_behind(values, keys):
    """Zeros in the rows of a half block that hold no keys: there may be NaN there."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    for i in gl.static_range(4):
        part = values.slice(i * 64, 64, dim=1)
        x = part.load(TILE)
        part.store(gl.where((n < keys)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()  # the tensor cores read through another path than threads write
    barrier()


@gluon.jit
def _copies(
    latent, rope, scale, table, begin, end, blocks, k_left, k_right, k_rope, k_scale,
    left_full, right_full, left_empty, right_empty, L: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The keys' way into shared memory: the left half with the rotated part, then the right."""
    PIECE: gl.constexpr = min(PAGE, 64)  # rows of a copy
    page = gl.load(table + begin // PAGE, mask=blocks > 0, other=0)
    for i in range(blocks):
        turn, phase = i & 1, (i >> 1) & 1
        start = begin + i * 64
        here = page
        page = gl.load(table + gl.minimum(start + 64, end - 1) // PAGE)
        full = left_full.index(turn)
        mbarrier.wait(left_empty.index(turn), phase ^ 1)
        mbarrier.expect(full, 64 * (64 + 256) * 2)
        for j in gl.static_range(64 // PIECE):
            if j > 0:  # behind the end the last page again: its shares are zero
                here = gl.load(table + gl.minimum(start + j * PIECE, end - 1) // PAGE)
            row = here * PAGE + (start + j * PIECE) % PAGE
            to = k_rope.index(turn).slice(j * PIECE, PIECE, dim=0)
            tma_load(rope, [row, 0], full, to)
            tma_load(latent, [row, 0], full, k_left.index(turn).slice(j * PIECE, PIECE, dim=0))
        full = right_full.index(turn)
        mbarrier.wait(right_empty.index(turn), phase ^ 1)
        mbarrier.expect(full, 64 * 256 * 2)
        for j in gl.static_range(64 // PIECE):
            if 64 // PIECE > 1:
                here = gl.load(table + gl.minimum(start + j * PIECE, end - 1) // PAGE)
            row = here * PAGE + (start + j * PIECE) % PAGE
            to = k_right.index(turn).slice(j * PIECE, PIECE, dim=0)
            tma_load(latent, [row, 256], full, to)


@gluon.jit
def _begin_scores(
    i, q_left, q_right, q_rope, k_left, k_right, k_rope, left_full, right_full, E4M3: gl.constexpr
):
    """Begins the products of the queries with block ``i``, each half once it is there."""
    turn, phase = i & 1, (i >> 1) & 1
    s = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)
    mbarrier.wait(left_full.index(turn), phase)
    if not E4M3:  # else it comes last
        k = k_rope.index(turn).permute((1, 0))
        s = warpgroup_mma(q_rope, k, s, use_acc=False, is_async=True)
    k = k_left.index(turn).permute((1, 0))
    s = warpgroup_mma(q_left, k, s, use_acc=not E4M3, is_async=True)
    mbarrier.wait(right_full.index(turn), phase)
    return warpgroup_mma(q_right, k_right.index(turn).permute((1, 0)), s, is_async=True)


@gluon.jit
def _scores(i, token, q_rope, k_rope, q_factor, k_scale, E4M3: gl.constexpr):
    """Block ``i``'s scores, once they are there; the rotated part is not scaled as E4M3 is."""
    s = warpgroup_mma_wait(0, deps=[token])
    if E4M3:
        scale = k_scale.index(i & 1).load(gl.SliceLayout(0, SCORES))
        s = s * (q_factor[:, None] * scale[None, :])
        s = warpgroup_mma(q_rope, k_rope.index(i & 1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    return s


@gluon.jit
def _shares(
    i, s, k_scale, start, end, last, m, total, inner, outer,
    MASKED: gl.constexpr, SOFTCAP: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """(shares as the tensor cores take them, factor of the past, m, total) of block ``i``."""
    if E4M3:
        scale = k_scale.index(i & 1).load(gl.SliceLayout(0, SCORES))
        return scaled_softmax(s, scale, start, end, last, m, total, inner, outer, MASKED, SOFTCAP)
    else:
        return _softmax(s, start, end, last, m, total, inner, outer, MASKED, SOFTCAP)


@gluon.jit
def _softmax(
    s, start, end, last, m, total, inner, outer, MASKED: gl.constexpr, SOFTCAP: gl.constexpr
):
    """(shares in bf16, factor of the past, m, total) of one block."""
    if SOFTCAP:
        s = 1 - 2 / (gl.exp2(s * inner) + 1)
        factor = outer
    else:
        factor = inner
    if MASKED:
        at = start + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
        seen = (at < end)[None, :] & (at[None, :] <= last[:, None])
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * factor)
    base = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s * factor - base[:, None])
    alpha = gl.exp2(m - base)
    return p.to(gl.bfloat16), alpha, top, total * alpha + gl.sum(p, 1)


@gluon.jit
def _publish(i, p, alpha, shares, alphas, right_empty):
    """Block ``i``'s shares and factors for the other warpgroup, once it is done with i - 1."""
    before = i + 1  # i - 1, two turns on
    mbarrier.wait(right_empty.index(before & 1), ((before >> 1) & 1) ^ 1)
    shares.store(p)
    alphas.store(alpha)
    fence_async_shared()
    barrier()


@gluon.jit
def _left(
    q, q_r, first, rows, NH, S, q_s, q_h, qr_s, qr_h, length, begin, end, blocks, inner, outer,
    out, lse, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale, shares, alphas, totals,
    left_full, right_full, left_empty, right_empty, ready, done,
    L: gl.constexpr, MANY: gl.constexpr, SOFTCAP: gl.constexpr, SPLIT: gl.constexpr,
    E4M3: gl.constexpr,
):  # fmt: skip
    """Scores and shares of every block, and the left half of the values."""
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    V_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    row = first + gl.arange(0, 64, layout=S_ROW)
    m = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
    total = gl.full([64], 0.0, gl.float32, layout=S_ROW)
    acc = gl.full([64, 256], 0.0, gl.float32, layout=VALUES)
    if blocks > 0:
        _queries(q_r, first, rows, NH, qr_s, qr_h, q_rope, 64)
        q_factor = m
        if E4M3:
            q_factor = half_queries(q, first, rows, NH, q_s, q_h, q_left, q_right)
            q_factor = gl.convert_layout(q_factor, S_ROW)
        else:
            _queries(q, first, rows, NH, q_s, q_h, q_left, 256)
            _queries(q + 256, first, rows, NH, q_s, q_h, q_right, 256)
        fence_async_shared()
        barrier()
        last = length - S + row // NH  # newest key that the row sees
        token = _begin_scores(
            0, q_left, q_right, q_rope, k_left, k_right, k_rope, left_full, right_full, E4M3
        )
        s = _scores(0, token, q_rope, k_rope, q_factor, k_scale, E4M3)
        for i in range(blocks - 1):
            start = begin + i * 64
            p, alpha, m, total = _shares(
                i, s, k_scale, start, end, last, m, total, inner, outer, MANY, SOFTCAP, E4M3
            )
            _publish(i, p, alpha, shares, alphas, right_empty)
            acc = acc * gl.convert_layout(alpha, V_ROW)[:, None]
            p = gl.convert_layout(p, OPERAND)
            pending = warpgroup_mma(p, k_left.index(i & 1), acc, is_async=True)
            token = _begin_scores(
                i + 1, q_left, q_right, q_rope, k_left, k_right, k_rope, left_full, right_full,
                E4M3,
            )  # fmt: skip
            acc, p = warpgroup_mma_wait(2 if E4M3 else 3, deps=[pending, p])
            mbarrier.arrive(left_empty.index(i & 1), count=1)
            s = _scores(i + 1, token, q_rope, k_rope, q_factor, k_scale, E4M3)
            # Only now: while exponentials are taken here, the tensor cores have nothing else to do.
            mbarrier.arrive(ready, count=1)
        i = blocks - 1
        start = begin + i * 64
        p, alpha, m, total = _shares(
            i, s, k_scale, start, end, last, m, total, inner, outer, True, SOFTCAP, E4M3
        )
        _publish(i, p, alpha, shares, alphas, right_empty)
        mbarrier.arrive(ready, count=1)
        scale = 1 / gl.where(total == 0, 1.0, total)
        totals.store(scale)
        barrier()
        mbarrier.arrive(done, count=1)
        acc = acc * gl.convert_layout(alpha, V_ROW)[:, None]
        if start + 64 > end:
            _zeros_behind(k_left.index(i & 1), end - start)
        p = gl.convert_layout(p, OPERAND)
        pending = warpgroup_mma(p, k_left.index(i & 1), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        acc = acc * gl.convert_layout(scale, V_ROW)[:, None]
    if SPLIT:
        z = gl.where(total == 0, float("-inf"), m + gl.log2(gl.where(total == 0, 1.0, total)))
        gl.store(lse + row, z, mask=row < rows)
        rows = gl.where(blocks > 0, rows, 0)
    _store(acc, k_left, out, first, rows, L, SPLIT)


@gluon.jit
def _right(
    first, rows, begin, end, blocks, out, k_right, shares, alphas, totals,
    right_full, right_empty, ready, done, L: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The right half of the values."""
    V_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    acc = gl.full([64, 256], 0.0, gl.float32, layout=VALUES)
    for i in range(blocks):
        turn, phase = i & 1, (i >> 1) & 1
        values = k_right.index(turn)
        mbarrier.wait(right_full.index(turn), phase)
        if begin + i * 64 + 64 > end:
            _zeros_behind(values, end - begin - i * 64)
        mbarrier.wait(ready, i & 1)
        acc = acc * alphas.load(V_ROW)[:, None]
        pending = warpgroup_mma(shares, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(right_empty.index(turn), count=1)
    if blocks > 0:
        mbarrier.wait(done, 0)
        acc = acc * totals.load(V_ROW)[:, None]
    if SPLIT:
        rows = gl.where(blocks > 0, rows, 0)
    _store(acc, k_right, out + 256, first, rows, L, SPLIT)


@gluon.jit
def _store(acc, room, out, first, rows, L: gl.constexpr, SPLIT: gl.constexpr):
    """A half of the result, or of a part's: that through ``room``, keys' that nobody needs now.

    Float32 as the products leave it is stored 32 bytes a row; so a warp stores whole lines.
    """
    if SPLIT:
        barrier()  # other warps' products have read the keys
        flat = reinterpret(room, gl.float32, [64, 256], FLAT)
        flat.store(acc)
        barrier()
        row = first + gl.arange(0, 16, layout=gl.SliceLayout(1, LINES))
        c = gl.arange(0, 256, layout=gl.SliceLayout(0, LINES))
        for i in gl.static_range(4):
            to = out + (row + i * 16)[:, None] * L + c[None, :]
            x = flat.slice(i * 16, 16, dim=0).load(LINES)
            gl.store(to, x, mask=(row + i * 16 < rows)[:, None])
    else:
        row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
        c = gl.arange(0, 256, layout=gl.SliceLayout(0, VALUES))
        to = out + row[:, None] * L + c[None, :]
        gl.store(to, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None])


@gluon.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def mla_decode_hopper(
    q_ptr, q_rope_ptr, latent, rope, scale_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, B, S, NH, slots, table_stride,
    q_b, q_s, q_h, qr_b, qr_s, qr_h,
    PAGE: gl.constexpr, L: gl.constexpr, R: gl.constexpr, MANY: gl.constexpr,
    SOFTCAP: gl.constexpr, SPLIT: gl.constexpr, BATCH: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    gdc_wait()  # it may be launched while the kernel before it still runs
    gdc_launch_dependents()  # the combining kernel waits by itself
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
    first, rows = gl.program_id(0) * 64, S * NH
    if SPLIT:
        rows = gl.where(parts > 0, rows, 0)  # a slot of no sequence writes nothing
        blocks = gl.where(parts > 0, blocks, 0)
    b = b.to(gl.int64)
    table = table_ptr + b * table_stride
    q, q_r = q_ptr + b * q_b, q_rope_ptr + b * qr_b
    at = slot.to(gl.int64) * (S * NH)  # not split: slots are sequences
    out, lse = out_ptr + at * L, lse_ptr + at

    KIND: gl.constexpr = gl.float16 if E4M3 else gl.bfloat16
    q_left = gl.allocate_shared_memory(KIND, [64, 256], SHARED)
    q_right = gl.allocate_shared_memory(KIND, [64, 256], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, R], SHARED)
    k_left = gl.allocate_shared_memory(KIND, [2, 64, 256], SHARED)
    k_right = gl.allocate_shared_memory(KIND, [2, 64, 256], SHARED)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, R], SHARED)
    k_scale = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    shares = gl.allocate_shared_memory(KIND, [64, 64], SHARED)
    alphas = gl.allocate_shared_memory(gl.float32, [64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [64], LINE)
    MB: gl.constexpr = mbarrier.MBarrierLayout()
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    ready = gl.allocate_shared_memory(gl.int64, [1], MB)
    done = gl.allocate_shared_memory(gl.int64, [1], MB)
    for i in gl.static_range(2):
        mbarrier.init(left_full.index(i), count=2 if E4M3 else 1)
        mbarrier.init(right_full.index(i), count=1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(done, count=1)

    RIGHT: gl.constexpr = RIGHT_E4M3_REGISTERS if E4M3 else RIGHT_REGISTERS
    COPY: gl.constexpr = DECODE_REGISTERS if E4M3 else COPY_REGISTERS
    gl.warp_specialize(
        [
            (_left, (
                q, q_r, first, rows, NH, S, q_s, q_h, qr_s, qr_h, length, begin, end, blocks,
                inner, outer, out, lse, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
                shares, alphas, totals, left_full, right_full, left_empty, right_empty,
                ready, done, L, MANY, SOFTCAP, SPLIT, E4M3,
            )),
            (_right, (
                first, rows, begin, end, blocks, out, k_right, shares, alphas, totals,
                right_full, right_empty, ready, done, L, SPLIT,
            )),
            (decoded if E4M3 else _copies, (
                latent, rope, scale_ptr, table, begin, end, blocks, k_left, k_right, k_rope,
                k_scale, left_full, right_full, left_empty, right_empty, L, PAGE,
            )),
        ],
        [4, 4 if E4M3 else 1], [RIGHT, COPY],
    )  # fmt: skip


def rows_of(pages: torch.Tensor, width: int) -> Any:
    """A cache [P, page, N] for the tensor memory accelerator: its rows, ``width`` columns a time.

    A copy is of 64 rows, or of a page if that has fewer.
    """
    P, page, N = pages.shape
    return TensorDescriptor(pages, [P * page, N], [N, 1], [min(page, 64), width], SHARED.value)
