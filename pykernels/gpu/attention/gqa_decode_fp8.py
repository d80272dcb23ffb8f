"""GQA decode whose lanes multiply what they load: ``attention_lanes``, E4M3 only.

The function of ``gqa_decode``'s Triton kernel for heads of 128. All that a step reads is asked for
one step ahead. Each warp has keys and a running softmax of its own; their results become one at the
end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gqa_decode_fp8_mma import (
    first_rows,
    in_half,
    in_order,
    key_words,
    left_keys,
    left_values,
    log2,
    pages_of,
    right_queries,
    right_shares,
    value_words,
)
from .hopper.split_kv import share_of_slot


@gluon.jit
def _scales(
    k_ptrs, v_ptrs, page, start, end, w, n, KVH: gl.constexpr, KEYS: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Of keys and values, [W, KEYS]; ones behind the end."""
    at = (first_rows(page, start, w, KEYS, PAGE) * KVH)[:, None]
    there = n[None, :] < (end - start - w * KEYS)[:, None]
    k_scale = gl.load(k_ptrs + at, mask=there, other=1.0)
    return k_scale, gl.load(v_ptrs + at, mask=there, other=1.0)


@gluon.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def gqa_decode_lanes(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, window, B, S, slots, table_stride, q_b, q_s, q_h,
    G: gl.constexpr, KVH: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, W: gl.constexpr,
    ROWS: gl.constexpr, BATCH: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, MANY: gl.constexpr, EARLY: gl.constexpr,
    LK: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    """One program: a part of a sequence's keys, for ROWS (8 or 16) query rows of a KV head.

    Args:
        k_ptr, v_ptr: int32 [P, PAGE, KVH, 32]; PAGE is a multiple of KEYS.
        KEYS: of a warp and step.
        MANY: more than one new token.
    """
    STEP: gl.constexpr = W * KEYS
    TOKEN: gl.constexpr = KVH * 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)  # [W, ROWS]
    KEY: gl.constexpr = gl.SliceLayout(2, MMA)  # [W, KEYS]
    QUERY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [W, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    if EARLY:
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    blocks = gl.cdiv(S * G, ROWS)
    kv, slot = gl.program_id(0) // blocks, gl.program_id(1)
    first_row = (gl.program_id(0) % blocks) * ROWS
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(
            length_ptr, slot, B, slots, S, window, STEP, BATCH, W, WINDOW
        )
    else:
        length = gl.load(length_ptr + b)
    first = 0
    if WINDOW:
        first = gl.maximum(0, length - S + 1 - window) // STEP * STEP
    each = gl.cdiv(gl.cdiv(length - first, STEP), gl.maximum(parts, 1)) * STEP
    begin = first + part * each
    end = gl.minimum(length, begin + each)
    if SPLIT:
        end = gl.where(parts > 0, end, begin)  # a slot of no sequence does nothing
    table = table_ptr + b.to(gl.int64) * table_stride

    # Where words, scales and shares lie. Warps are the first dimension.
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
    q, factor = in_half(q)
    factor = gl.convert_layout(factor, ROW)[:, None, :] * inner
    q = right_queries(q, RIGHT)
    row_s = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW))
    last = length - S + row_s // G  # newest key that the row sees

    m = gl.full([W, ROWS], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([W, ROWS], 0.0, gl.float32, layout=ROW)
    acc = gl.full([W, 128, ROWS], 0.0, gl.float32, layout=MMA)
    zero = gl.full([W, KEYS, ROWS], 0.0, gl.float32, layout=MMA)
    for start in range(begin, end, STEP):
        after = start + STEP
        k = left_keys(k_words, LEFT)
        k_words = key_words(k_at, pk, after, wk, TOKEN, KEYS, PAGE)
        pk = pages_of(table, after + STEP, end, wk, KEYS, PAGE)
        s = mma_v2(k, q, zero)
        # As in ``attention_parts.scaled_step``: the values' factors are in the shares.
        s = s * k_scale[:, :, None]
        weight = gl.maximum(v_scale, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
        k_scale, v_scale = _scales(ks_at, vs_at, ps, after, end, ws, ns, KVH, KEYS, PAGE)
        ps = pages_of(table, after + STEP, end, ws, KEYS, PAGE)
        if SOFTCAP:
            s = 1 - 2 / (gl.exp2(s * factor) + 1)
            s = s * outer
        else:
            s = s * factor
        s += log2(weight)[:, :, None]
        key = start + ws[:, None] * KEYS + ns[None, :]
        seen = (key < end)[:, :, None]
        if MANY:
            seen = seen & (key[:, :, None] <= last[None, None, :])
        if WINDOW:
            seen = seen & (key[:, :, None] > last[None, None, :] - window)
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1))
        base = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        p = gl.exp2(s - base[:, None, :])
        alpha = gl.exp2(m - base)
        m = top
        total = total * alpha + gl.sum(p * (1 / weight)[:, :, None], 1)
        v = left_values(v_words, LEFT)
        v_words = value_words(v_at, pv, after, end, wv, nv, TOKEN, KEYS, PAGE)
        pv = pages_of(table, after + STEP, end, wv, KEYS, PAGE)
        acc = mma_v2(v, right_shares(p, RIGHT), acc * alpha[:, None, :])

    # The warps' results become one.
    top = gl.max(m, 0)
    base = gl.where(top == float("-inf"), 0.0, top)
    share = gl.exp2(m - base[None, :])
    total = gl.sum(total * share, 0)
    acc = gl.sum(acc * share[:, None, :], 0)
    y = gl.convert_layout(in_order(acc), OUT)
    whole = gl.convert_layout(total, gl.SliceLayout(1, OUT))
    y = y / gl.where(whole == 0, 1.0, whole)[:, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    # Not split: slots are sequences.
    o_at = (slot.to(gl.int64) * S + row // G) * (KVH * G) + kv * G + row % G
    to = out_ptr + o_at[:, None] * 128 + c[None, :]
    if SPLIT:
        z = gl.where(total == 0, float("-inf"), top + gl.log2(gl.where(total == 0, 1.0, total)))
        z = gl.convert_layout(z, gl.SliceLayout(1, OUT))
        rows = gl.where(parts > 0, S * G, 0)
        gl.store(lse_ptr + o_at, z, mask=row < rows)
        rows = gl.where(begin < end, rows, 0)
        gl.store(to, y, mask=(row < rows)[:, None])
    else:
        gl.store(to, y.to(out_ptr.dtype.element_ty), mask=(row < S * G)[:, None])
