"""Absorbed MLA decode written out for Hopper: 64 rows and 64 keys a step, two warpgroups.

The same function as ``mla_decode``'s Triton kernel, in Gluon, where the order of copies and
products is ours. Triton starts a block's copy behind the products of the block before it, with no
shared memory left for a third block (two are 144 KiB, the queries 72); here it starts before them,
so that it has a whole step. Each warpgroup takes half of the keys' columns of the scores, then half
of the value's 512 columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 and 3.9 have different names for the same.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

ROWS = KEYS = 64
WARPS = 8


@gluon.jit
def _share(length_ptr, slot, B, slots, BATCH: gl.constexpr):
    """``attention_parts.share_of_slot``: (sequence, its length, part, parts)."""
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    i = gl.arange(0, BATCH, layout=gl.SliceLayout(0, SQUARE))
    lengths = gl.load(length_ptr + i, mask=i < B, other=0)
    blocks = gl.cdiv(lengths, 64)
    parts = 1 + (slots - B) * blocks // gl.maximum(gl.sum(blocks, 0), 1)
    parts = gl.where(i < B, parts, 0)
    j = gl.arange(0, BATCH, layout=gl.SliceLayout(1, SQUARE))
    start = gl.sum(gl.where(i[None, :] < j[:, None], parts[None, :], 0), 1)
    start = gl.convert_layout(start, gl.SliceLayout(0, SQUARE))
    mine = (slot >= start) & (slot < start + parts)
    b = gl.sum(gl.where(mine, i, 0), 0)
    length = gl.sum(gl.where(mine, lengths, 0), 0)
    part = slot - gl.sum(gl.where(mine, start, 0), 0)
    return b, length, part, gl.sum(gl.where(mine, parts, 0), 0)


@gluon.jit
def _pages(table, start, end, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Pages of the 64 keys from ``start`` on, those behind the end being the last key again."""
    n = gl.minimum(start + gl.arange(0, 64, layout=LAYOUT), end - 1)
    return gl.load(table + gl.maximum(n, 0) // PAGE, mask=n >= 0, other=0)


@gluon.jit
def _copy(base, width: gl.constexpr, pages, start, end, to, PAGE: gl.constexpr, L: gl.constexpr):
    """Begins the copy of 64 cache rows; behind the end the last row again, so no NaN gets in."""
    n = gl.minimum(start + gl.arange(0, 64, layout=gl.SliceLayout(1, L)), end - 1)
    at = pages.to(gl.int64) * PAGE + n % PAGE
    c = gl.arange(0, width, layout=gl.SliceLayout(0, L))
    async_load(to, base + at[:, None] * width + c[None, :])


@gluon.jit
def _queries(base, b, b_stride, s_stride, h_stride, first, S, NH, width: gl.constexpr, to,
             L: gl.constexpr):  # fmt: skip
    """64 query rows into shared memory, zeros behind the last."""
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, width, layout=gl.SliceLayout(0, L))
    at = b.to(gl.int64) * b_stride + (row // NH).to(gl.int64) * s_stride + (row % NH) * h_stride
    to.store(gl.load(base + at[:, None] + c[None, :], mask=(row < S * NH)[:, None], other=0.0))


@gluon.jit
def mla_decode_hopper(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, B, S, NH, slots, table_stride,
    q_b, q_s, q_h, qr_b, qr_s, qr_h,
    PAGE: gl.constexpr, L: gl.constexpr, R: gl.constexpr,
    SOFTCAP: gl.constexpr, SPLIT: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    S_COL: gl.constexpr = gl.SliceLayout(0, SCORES)
    V_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)

    slot = gl.program_id(1)
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = _share(length_ptr, slot, B, slots, BATCH)
        if parts == 0:
            return
    else:
        length = gl.load(length_ptr + b)
    first = gl.program_id(0) * 64
    q = gl.allocate_shared_memory(gl.bfloat16, [64, L], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, R], SHARED)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2, 64, L], SHARED)
    k_ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, R], SHARED)
    shares = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)

    each = gl.cdiv(gl.cdiv(length, 64), parts) * 64
    begin = part * each
    end = gl.minimum(length, begin + each)
    table = table_ptr + b.to(gl.int64) * table_stride
    wide = _pages(table, begin, end, PAGE, gl.SliceLayout(1, WIDE))
    narrow = _pages(table, begin, end, PAGE, gl.SliceLayout(1, NARROW))
    if begin < end:
        _copy(latent_ptr, L, wide, begin, end, ks.index(0), PAGE, WIDE)
        _copy(rope_ptr, R, narrow, begin, end, k_ropes.index(0), PAGE, NARROW)
    async_copy.commit_group()
    wide = _pages(table, begin + 64, end, PAGE, gl.SliceLayout(1, WIDE))
    narrow = _pages(table, begin + 64, end, PAGE, gl.SliceLayout(1, NARROW))
    _queries(q_ptr, b, q_b, q_s, q_h, first, S, NH, L, q, WIDE)
    _queries(q_rope_ptr, b, qr_b, qr_s, qr_h, first, S, NH, R, q_rope, NARROW)

    row = first + gl.arange(0, 64, layout=S_ROW)
    last = length - S + row // NH  # newest key that the row sees
    n = gl.arange(0, 64, layout=S_COL)
    m = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
    acc = gl.full([64, L], 0.0, gl.float32, layout=VALUES)
    zeros = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)
    total = gl.sum(zeros.reshape([64, 2, 32]), 2)  # of each warpgroup's columns, so far
    BOTH: gl.constexpr = total.type.layout
    turn = 0
    for start in range(begin, end, 64):
        k, k_rope = ks.index(turn), k_ropes.index(turn)
        turn = turn ^ 1
        async_copy.wait_group(0)
        barrier()  # all threads' copies are there, and nobody reads the other block any more
        fence_async_shared()  # the tensor cores read through another path than copies write
        if start + 64 < end:
            _copy(latent_ptr, L, wide, start + 64, end, ks.index(turn), PAGE, WIDE)
            _copy(rope_ptr, R, narrow, start + 64, end, k_ropes.index(turn), PAGE, NARROW)
        async_copy.commit_group()
        wide = _pages(table, start + 128, end, PAGE, gl.SliceLayout(1, WIDE))
        narrow = _pages(table, start + 128, end, PAGE, gl.SliceLayout(1, NARROW))

        s = warpgroup_mma(q_rope, k_rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if SOFTCAP:
            s = 1 - 2 / (gl.exp2(s * inner) + 1)
            factor = outer
        else:
            factor = inner
        at = start + n
        seen = (at < end)[None, :] & (at[None, :] <= last[:, None])
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1) * factor)
        base = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s * factor - base[:, None])
        alpha = gl.exp2(m - base)
        shares.store(p.to(gl.bfloat16))
        alphas = gl.convert_layout(alpha, gl.SliceLayout(1, BOTH))[:, None]
        total = total * alphas + gl.sum(p.reshape([64, 2, 32]), 2)
        m = top
        acc = acc * gl.convert_layout(alpha, V_ROW)[:, None]
        fence_async_shared()
        barrier()  # both warpgroups' shares are there
        acc = warpgroup_mma(shares, k, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    total = gl.convert_layout(gl.sum(total, 1), S_ROW)
    scale = 1 / gl.where(total == 0, 1.0, total)
    y = acc * gl.convert_layout(scale, V_ROW)[:, None]
    v_row = first + gl.arange(0, 64, layout=V_ROW)
    c = gl.arange(0, L, layout=gl.SliceLayout(0, VALUES))
    rows = slot.to(gl.int64) * (S * NH)  # not split: slots are sequences
    out = out_ptr + (rows + v_row)[:, None] * L + c[None, :]
    if SPLIT:
        lse = m + gl.log2(gl.where(total == 0, 1.0, total))
        lse = gl.where(total == 0, float("-inf"), lse)
        gl.store(lse_ptr + rows + row, lse, mask=row < S * NH)
        if begin < end:
            gl.store(out, y.to(out_ptr.dtype.element_ty), mask=(v_row < S * NH)[:, None])
    else:
        gl.store(out, y.to(out_ptr.dtype.element_ty), mask=(v_row < S * NH)[:, None])
