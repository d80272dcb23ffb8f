"""GQA decode of bf16 for Hopper: FlashDecoding with a ring buffer of blocks in shared memory.

The tensor memory accelerator keeps a ring buffer of blocks of 64 keys and values filled. Each of
four warps has 16 keys of a block and an online softmax of its own, so that nothing passes between
warps until the end: scores become probabilities in the registers in which the next product takes
them.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_compat import barrier, tma_load
from ..online_softmax import (
    capped,
    find_split,
    first_key,
    log_sum_exp,
    split_range,
    with_sink,
)
from .split_kv import claim_counter, combine_splits, is_last

WARPS = 4
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
OPERAND_A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
OPERAND_B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
_WARPS = [[16, 0], [32, 0]]
KEY = gl.constexpr(  # [64 keys, 128] as operands B, each warp its 16 keys
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64], [8, 0]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        _WARPS,
        [],
        [64, 128],
    )
)
VALUE = gl.constexpr(  # the same where keys are summed over
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        _WARPS,
        [],
        [64, 128],
    )
)
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
PAGES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _pages(table, begin, end, i, PAGE: gl.constexpr):
    """Pages [32] of the blocks i, i + 1, ..."""
    at = begin + (i + gl.arange(0, 32, layout=PAGES)) * 64
    return gl.load(table + at // PAGE, mask=at < end, other=0)


@gluon.jit
def _keys_of(length, split, num_splits, S, window, WINDOW: gl.constexpr):
    """A split's (first key, end)."""
    first = first_key(length, S, window, 64, WINDOW)
    begin, end = split_range(first, length, split, num_splits, 64, True)
    return begin, gl.where(num_splits > 0, end, begin)


@gluon.jit
def _start_copies(
    k_rows, v_rows, kv, pages, begin, i, stage, k_full, v_full, ks, vs, PAGE: gl.constexpr
):
    """Begins the copies of block ``i``, whose page is one of ``pages``."""
    mine = gl.arange(0, 32, layout=PAGES) == i % 32
    page = gl.sum(gl.where(mine, pages, 0), 0)
    row = page * PAGE + (begin + i * 64) % PAGE
    mbarrier.expect(k_full.index(stage), 64 * 128 * 2)
    tma_load(k_rows, [row, kv * 128], k_full.index(stage), ks.index(stage))
    mbarrier.expect(v_full.index(stage), 64 * 128 * 2)
    tma_load(v_rows, [row, kv * 128], v_full.index(stage), vs.index(stage))


@gluon.jit
def _zeros_behind(values, keys):
    """Zeros in the rows that hold no keys: there may be NaN, and 0 * NaN is NaN."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    x = values.load(TILE)
    values.store(gl.where((n < keys)[:, None], x, gl.zeros_like(x)))
    barrier()


@gluon.jit(
    do_not_specialize=["B", "total_splits", "table_stride", "width", "call"]
)  # a batch or call compiles nothing new
def gqa_decode_ring(
    q_ptr,
    k_rows,
    v_rows,
    table_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    inner,
    outer,
    window,
    B,
    S,
    total_splits,
    table_stride,
    q_b,
    q_s,
    q_h,
    width,
    call,
    counters,
    result,
    G: gl.constexpr,
    KVH: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    BATCH: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr,
    MULTI_TOKEN: gl.constexpr,
    EARLY: gl.constexpr,
    REDUCE: gl.constexpr,
):
    """One CTA: a split of a sequence's keys, for 16 query rows of a KV head.

    Args:
        k_rows, v_rows: ``rows_of`` the caches; PAGE is a multiple of 64.
        sink_ptr: one of each query head, or None.
        width: of the page table.
        call, counters: ``split_kv.new_counters``: of each sequence, KV head and tile, if REDUCE.
        result: bf16 [B, S * KVH * G, 128], if REDUCE: the splits are combined here.
        MULTI_TOKEN: more than one new token.
    """
    ROW: gl.constexpr = gl.SliceLayout(2, MMA)  # [4, 16]
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], SHARED)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], SHARED)
    MB: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MB)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MB)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    tiles = gl.cdiv(S * G, 16)
    kv, split_idx = gl.program_id(0) // tiles, gl.program_id(1)
    first_row = (gl.program_id(0) % tiles) * 16
    if SPLIT:
        # The lengths are loaded before the wait for the kernel in front, which may still write
        # them: a guess, with which the split is found meanwhile. They are loaded again behind it.
        i = gl.arange(0, BATCH, layout=PAGES)
        guess = gl.load(length_ptr + i, mask=i < B, other=0, cache_modifier=".cg")
        guess = gl.minimum(gl.maximum(guess, 0), width * PAGE)
        b, length, split, num_splits = find_split(
            i, guess, split_idx, B, total_splits, S, window, 64, WINDOW
        )
        begin, end = _keys_of(length, split, num_splits, S, window, WINDOW)
        table = table_ptr + b.to(gl.int64) * table_stride
        if EARLY:
            gdc_wait()  # for what the kernel before this one wrote
            gdc_launch_dependents()  # whatever follows waits by itself
        lengths = gl.load(length_ptr + i, mask=i < B, other=0)
        pages = _pages(table, begin, end, 0, PAGE)
        if gl.max((lengths != guess).to(gl.int32), 0) > 0:
            b, length, split, num_splits = find_split(
                i, lengths, split_idx, B, total_splits, S, window, 64, WINDOW
            )
            begin, end = _keys_of(length, split, num_splits, S, window, WINDOW)
            table = table_ptr + b.to(gl.int64) * table_stride
            pages = _pages(table, begin, end, 0, PAGE)
    else:
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        b, num_splits = split_idx, 1
        length = gl.load(length_ptr + b)
        begin, end = _keys_of(length, 0, 1, S, window, WINDOW)
        table = table_ptr + b.to(gl.int64) * table_stride
        pages = _pages(table, begin, end, 0, PAGE)
    blocks = gl.maximum(gl.cdiv(end - begin, 64), 0)

    barrier()
    for i in gl.static_range(STAGES):
        if i < blocks:
            _start_copies(k_rows, v_rows, kv, pages, begin, i, i, k_full, v_full, ks, vs, PAGE)
    following = _pages(table, begin, end, 32, PAGE)

    if REDUCE:
        counter = counters + b * gl.num_programs(0) + gl.program_id(0)
        if num_splits > 0:
            claim_counter(counter, call)

    wq = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))
    row = first_row + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))
    q_at = b.to(gl.int64) * q_b + (row // G).to(gl.int64) * q_s + (kv * G + row % G) * q_h
    at = q_at[None, :, None] + c[None, None, :] + (wq * 0)[:, None, None]
    inside = (row < S * G)[None, :, None] & (wq >= 0)[:, None, None]
    q = gl.convert_layout(gl.load(q_ptr + at, mask=inside, other=0.0), OPERAND_A)

    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
    row = first_row + gl.arange(0, 16, layout=gl.SliceLayout(0, ROW))
    last = length - S + row // G  # newest key that the row attends to
    key = w[:, None, None] * 16 + n[None, None, :]
    factor = inner
    if SOFTCAP:
        factor = outer

    m_i = gl.full([4, 16], float("-inf"), gl.float32, layout=ROW)
    l_i = gl.full([4, 16], 0.0, gl.float32, layout=ROW)
    acc = gl.full([4, 16, 128], 0.0, gl.float32, layout=MMA)
    zero = gl.full([4, 16, 16], 0.0, gl.float32, layout=MMA)
    stage, phase = 0, 0
    for i in range(blocks):
        start = begin + i * 64
        mbarrier.wait(k_full.index(stage), phase)
        k = ks.index(stage).load(KEY).reshape([4, 16, 128]).permute([0, 2, 1])
        s = mma_v2(q, gl.convert_layout(k, OPERAND_B), zero)
        if SOFTCAP:
            s = capped(s, inner)
        mask = start + key < end
        if MULTI_TOKEN:
            mask = mask & (start + key <= last[None, :, None])
        if WINDOW:
            mask = mask & (start + key > last[None, :, None] - window)
        s = gl.where(mask, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 2) * factor)
        base = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row without a key so far
        p = gl.exp2(s * factor - base[:, :, None])
        alpha = gl.exp2(m_i - base)
        m_i = m_new
        l_i = l_i * alpha + gl.sum(p, 2)
        acc = acc * alpha[:, :, None]
        mbarrier.wait(v_full.index(stage), phase)
        if start + 64 > end:
            _zeros_behind(vs.index(stage), end - start)
        v = vs.index(stage).load(VALUE).reshape([4, 16, 128])
        p = gl.convert_layout(p.to(gl.bfloat16), OPERAND_A)
        acc = mma_v2(p, gl.convert_layout(v, OPERAND_B), acc)
        barrier()  # all warps are done with this block
        ahead = i + STAGES
        if ahead < blocks:
            if ahead % 32 == 0:
                pages = following
                following = _pages(table, begin, end, ahead + 32, PAGE)
            _start_copies(
                k_rows, v_rows, kv, pages, begin, ahead, stage, k_full, v_full, ks, vs, PAGE
            )
        stage += 1
        if stage == STAGES:
            stage, phase = 0, phase ^ 1

    # The warps' results become one: each leaves its own in shared memory, and all are added up.
    acc_shared = gl.allocate_shared_memory(gl.float32, [64, 128], FLAT)
    m_shared = gl.allocate_shared_memory(gl.float32, [64], LINE)
    l_shared = gl.allocate_shared_memory(gl.float32, [64], LINE)
    acc_shared.store(acc.reshape([64, 128]))
    m_shared.store(m_i.reshape([64]))
    l_shared.store(l_i.reshape([64]))
    barrier()
    HERE: gl.constexpr = gl.SliceLayout(1, OUT)
    m_i = m_shared.slice(0, 16).load(HERE)
    for i in gl.static_range(1, 4):
        m_i = gl.maximum(m_i, m_shared.slice(i * 16, 16).load(HERE))
    base = gl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = gl.full([16], 0.0, gl.float32, layout=HERE)
    y = gl.full([16, 128], 0.0, gl.float32, layout=OUT)
    for i in gl.static_range(4):
        weight = gl.exp2(m_shared.slice(i * 16, 16).load(HERE) - base)
        l_i += l_shared.slice(i * 16, 16).load(HERE) * weight
        y += acc_shared.slice(i * 16, 16, dim=0).load(OUT) * weight[:, None]
    if sink_ptr is not None and not SPLIT:
        row = first_row + gl.arange(0, 16, layout=HERE)
        l_i = with_sink(gl.load(sink_ptr + kv * G + row % G), m_i, l_i)
    y = y / gl.where(l_i == 0, 1.0, l_i)[:, None]
    row = first_row + gl.arange(0, 16, layout=HERE)
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    # Not split: of a sequence.
    o_at = (split_idx.to(gl.int64) * S + row // G) * (KVH * G) + kv * G + row % G
    to = out_ptr + o_at[:, None] * 128 + c[None, :]
    if SPLIT:
        z = log_sum_exp(m_i, l_i)
        rows = gl.where(num_splits > 0, S * G, 0)
        gl.store(lse_ptr + o_at, z, mask=row < rows)
        rows = gl.where(begin < end, rows, 0)
        gl.store(to, y, mask=(row < rows)[:, None])
        if REDUCE:
            if num_splits > 0:
                if is_last(counter, num_splits):
                    R = S * (KVH * G)
                    combine_splits(
                        out_ptr,
                        lse_ptr,
                        result,
                        sink_ptr,
                        split_idx - split,
                        num_splits,
                        R,
                        b * R,
                        first_row,
                        S * G,
                        kv,
                        G,
                        KVH,
                    )
    else:
        gl.store(to, y.to(out_ptr.dtype.element_ty), mask=(row < S * G)[:, None])


def rows_of(pages: torch.Tensor) -> Any:
    """A cache [P, page, KVH, 128] for the tensor memory accelerator: 64 rows of a head a copy."""
    P, page, KVH, D = pages.shape
    return TensorDescriptor(pages, [P * page, KVH * D], [KVH * D, 1], [64, D], SHARED.value)
