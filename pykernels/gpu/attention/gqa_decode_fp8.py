"""GQA decode of an E4M3 cache whose operands are dequantized in the registers of ``mma.sync``.

FlashDecoding as ``gqa_decode``'s Triton kernel does it, for heads of 128, in Gluon. All that a step
reads is asked for one step ahead. Each warp has keys and an online softmax of its own; their
results become one at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gqa_decode_fp8_mma import (
    first_rows,
    half_rows,
    key_operand,
    key_words,
    log2,
    p_operand,
    pages_of,
    query_operand,
    unpermute_columns,
    value_operand,
    value_words,
)
from .hopper.split_kv import load_lengths
from .online_softmax import capped, find_split, first_key, log_sum_exp, split_range, with_sink


@gluon.jit
def _scales(
    k_ptrs,
    v_ptrs,
    page,
    start,
    end,
    w,
    n,
    KVH: gl.constexpr,
    KEYS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Scales of keys and values, [W, KEYS]; ones behind the end."""
    at = (first_rows(page, start, w, KEYS, PAGE) * KVH)[:, None]
    valid = n[None, :] < (end - start - w * KEYS)[:, None]
    k_scale = gl.load(k_ptrs + at, mask=valid, other=1.0)
    return k_scale, gl.load(v_ptrs + at, mask=valid, other=1.0)


@gluon.jit(do_not_specialize=["B", "total_splits", "table_stride"])  # a batch compiles nothing new
def gqa_decode_fp8(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    G: gl.constexpr,
    KVH: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    W: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr,
    MULTI_TOKEN: gl.constexpr,
    EARLY: gl.constexpr,
    LK: gl.constexpr,
    LV: gl.constexpr,
):
    """One CTA: a split of a sequence's keys, for ROWS (8 or 16) query rows of a KV head.

    Args:
        k_ptr, v_ptr: int32 [P, PAGE, KVH, 32]; PAGE is a multiple of KEYS.
        KEYS: of a warp and step.
        MULTI_TOKEN: more than one new token.
    """
    STEP: gl.constexpr = W * KEYS
    TOKEN: gl.constexpr = KVH * 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    OPERAND_A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    OPERAND_B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)  # [W, ROWS]
    KEY: gl.constexpr = gl.SliceLayout(2, MMA)  # [W, KEYS]
    QUERY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [W, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    if EARLY:
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    blocks = gl.cdiv(S * G, ROWS)
    kv, split_idx = gl.program_id(0) // blocks, gl.program_id(1)
    first_row = (gl.program_id(0) % blocks) * ROWS
    b, split, num_splits = split_idx, 0, 1
    if SPLIT:
        i, lengths = load_lengths(length_ptr, B, BATCH, W)
        b, length, split, num_splits = find_split(
            i, lengths, split_idx, B, total_splits, S, window, STEP, WINDOW
        )
    else:
        length = gl.load(length_ptr + b)
    first = first_key(length, S, window, STEP, WINDOW)
    begin, end = split_range(first, length, split, num_splits, STEP, True)
    if SPLIT:
        end = gl.where(num_splits > 0, end, begin)  # a split of no sequence does nothing
    table = table_ptr + b.to(gl.int64) * table_stride

    # Where words, scales and scores lie. Warps are the first dimension.
    wk = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LK)))
    wv = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LV)))
    ws = gl.arange(0, W, layout=gl.SliceLayout(1, KEY))
    nk = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LK)))
    nv = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LV)))
    ns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, KEY))
    ik = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LK)))
    iv = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LV)))
    k_at = k_ptr + kv * 32 + nk[None, :, None] * TOKEN + ik[None, None, :]
    v_at = v_ptr + kv * 32 + nv[None, :, None] * TOKEN + iv[None, None, :]

    pk = pages_of(table, begin, end, wk, KEYS, PAGE)
    pv = pages_of(table, begin, end, wv, KEYS, PAGE)
    k_words = key_words(k_at, pk, begin, wk, TOKEN, KEYS, PAGE)
    v_words = value_words(v_at, pv, begin, end, wv, nv, TOKEN, KEYS, PAGE)
    ks_at = k_scale_ptr + kv + (ns * KVH)[None, :]
    vs_at = v_scale_ptr + kv + (ns * KVH)[None, :]
    ps = pages_of(table, begin, end, ws, KEYS, PAGE)
    k_scale, v_scale = _scales(ks_at, vs_at, ps, begin, end, ws, ns, KVH, KEYS, PAGE)
    ps = pages_of(table, begin + STEP, end, ws, KEYS, PAGE)
    pk = pages_of(table, begin + STEP, end, wk, KEYS, PAGE)
    pv = pages_of(table, begin + STEP, end, wv, KEYS, PAGE)

    wq = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))
    q_at = b.to(gl.int64) * q_b + (row // G).to(gl.int64) * q_s + (kv * G + row % G) * q_h
    at = q_at[None, :, None] + c[None, None, :] + (wq * 0)[:, None, None]
    inside = (row < S * G)[None, :, None] & (wq >= 0)[:, None, None]
    q = gl.load(q_ptr + at, mask=inside, other=0.0)
    q, factor = half_rows(q)
    factor = gl.convert_layout(factor, ROW)[:, None, :] * inner
    q = query_operand(q, OPERAND_B)
    row_s = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW))
    last = length - S + row_s // G  # newest key that the row attends to

    m_i = gl.full([W, ROWS], float("-inf"), gl.float32, layout=ROW)
    l_i = gl.full([W, ROWS], 0.0, gl.float32, layout=ROW)
    acc = gl.full([W, 128, ROWS], 0.0, gl.float32, layout=MMA)
    zero = gl.full([W, KEYS, ROWS], 0.0, gl.float32, layout=MMA)
    for start in range(begin, end, STEP):
        after = start + STEP
        k = key_operand(k_words, OPERAND_A)
        k_words = key_words(k_at, pk, after, wk, TOKEN, KEYS, PAGE)
        pk = pages_of(table, after + STEP, end, wk, KEYS, PAGE)
        s = mma_v2(k, q, zero)
        # As in ``softmax_step_scaled``: the values' scales are in ``p``.
        s = s * k_scale[:, :, None]
        weight = gl.maximum(v_scale, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
        k_scale, v_scale = _scales(ks_at, vs_at, ps, after, end, ws, ns, KVH, KEYS, PAGE)
        ps = pages_of(table, after + STEP, end, ws, KEYS, PAGE)
        if SOFTCAP:
            s = capped(s, factor)
            s = s * outer
        else:
            s = s * factor
        s += log2(weight)[:, :, None]
        key = start + ws[:, None] * KEYS + ns[None, :]
        mask = (key < end)[:, :, None]
        if MULTI_TOKEN:
            mask = mask & (key[:, :, None] <= last[None, None, :])
        if WINDOW:
            mask = mask & (key[:, :, None] > last[None, None, :] - window)
        s = gl.where(mask, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1))
        base = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row without a key so far
        p = gl.exp2(s - base[:, None, :])
        alpha = gl.exp2(m_i - base)
        m_i = m_new
        l_i = l_i * alpha + gl.sum(p * (1 / weight)[:, :, None], 1)
        v = value_operand(v_words, OPERAND_A)
        v_words = value_words(v_at, pv, after, end, wv, nv, TOKEN, KEYS, PAGE)
        pv = pages_of(table, after + STEP, end, wv, KEYS, PAGE)
        acc = mma_v2(v, p_operand(p, OPERAND_B), acc * alpha[:, None, :])

    # The warps' results become one.
    m_all = gl.max(m_i, 0)
    base = gl.where(m_all == float("-inf"), 0.0, m_all)
    alpha = gl.exp2(m_i - base[None, :])
    l_i = gl.sum(l_i * alpha, 0)
    acc = gl.sum(acc * alpha[:, None, :], 0)
    y = gl.convert_layout(unpermute_columns(acc), OUT)
    if sink_ptr is not None and not SPLIT:
        l_i = with_sink(gl.load(sink_ptr + kv * G + row_s % G), m_all, l_i)
    l_row = gl.convert_layout(l_i, gl.SliceLayout(1, OUT))
    y = y / gl.where(l_row == 0, 1.0, l_row)[:, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    # Not split: of a sequence.
    o_at = (split_idx.to(gl.int64) * S + row // G) * (KVH * G) + kv * G + row % G
    to = out_ptr + o_at[:, None] * 128 + c[None, :]
    if SPLIT:
        z = gl.convert_layout(log_sum_exp(m_all, l_i), gl.SliceLayout(1, OUT))
        rows = gl.where(num_splits > 0, S * G, 0)
        gl.store(lse_ptr + o_at, z, mask=row < rows)
        rows = gl.where(begin < end, rows, 0)
        gl.store(to, y, mask=(row < rows)[:, None])
    else:
        gl.store(to, y.to(out_ptr.dtype.element_ty), mask=(row < S * G)[:, None])
