"""The two consumer warpgroups of ``mla_decode_hopper``.

Each has half of the result's columns, and computes scores and probabilities of every second block:
the left one of the even blocks, the right one of the odd ones. So while one takes exponentials, the
tensor cores have the other's scores, or the values of the block before. Probabilities and running
maximum of a block go to the other through shared memory. Both keep ``m_i`` of all rows, and each
the ``l_i`` of its own blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ...common.gluon_compat import barrier
from ..online_softmax import capped, exp_scores, log_sum_exp
from .mla_decode_fp8 import half_queries, scaled_softmax
from .mla_decode_loads import query_rows, split_of_cta, zeros_behind
from .mla_split_kv import store_lse, store_split

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _opaque(number):
    """``number``, of which the compiler knows nothing.

    Buffers at constant indices have constant descriptors, a hundred, which it would keep in
    registers throughout the loop, and spill.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_half(full, stage, phase, COLUMNS: gl.constexpr):
    """Waits for half a block."""
    for c in gl.static_range(256 // COLUMNS):
        mbarrier.wait(full.index(stage * (256 // COLUMNS) + c), phase)


@gluon.jit
def _begin_scores(
    zero, stage, phase, q_left, q_right, q_rope, k_left, k_right, k_rope, left_full, right_full,
    COLUMNS: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Begins the products of the queries with a block of keys, each piece once it has arrived."""
    PIECES: gl.constexpr = 256 // COLUMNS
    s = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)
    for c in gl.static_range(PIECES):
        mbarrier.wait(left_full.index(stage * PIECES + c), phase)
        if c == 0 and not E4M3:  # else it comes last
            k = k_rope.index(stage).permute((1, 0))
            s = warpgroup_mma(q_rope.index(zero), k, s, use_acc=False, is_async=True)
        q = q_left.index(zero).slice(c * COLUMNS, COLUMNS, dim=1)
        k = k_left.index(stage).slice(c * COLUMNS, COLUMNS, dim=1).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=not (E4M3 and c == 0), is_async=True)
    for c in gl.static_range(PIECES):
        mbarrier.wait(right_full.index(stage * PIECES + c), phase)
        q = q_right.index(zero).slice(c * COLUMNS, COLUMNS, dim=1)
        k = k_right.index(stage).slice(c * COLUMNS, COLUMNS, dim=1).permute((1, 0))
        s = warpgroup_mma(q, k, s, is_async=True)
    return s


@gluon.jit
def _scores(token, q_rope, k_rope, q_factor, k_scale, stage, E4M3: gl.constexpr):
    """A block's scores, once they are done; the rotated part is bf16 and has no scale."""
    s = warpgroup_mma_wait(0, deps=[token])
    if E4M3:
        scale = k_scale.index(stage).load(gl.SliceLayout(0, SCORES))
        s = s * (q_factor[:, None] * scale[None, :])
        s = warpgroup_mma(q_rope, k_rope.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    return s


@gluon.jit
def _softmax(
    s, k_scale, stage, start, end, last, m_i, l_i, inner, outer,
    MASKED: gl.constexpr, SOFTCAP: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """(p as the tensor cores take it, factor of what was accumulated, m_i, l_i) of a block."""
    if E4M3:
        return scaled_softmax(
            s, k_scale, stage, start, end, last, m_i, l_i, inner, outer, MASKED, SOFTCAP
        )
    else:
        if SOFTCAP:
            s = capped(s, inner)
        mask = s  # not read
        if MASKED:
            at = start + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
            mask = (at < end)[None, :] & (at[None, :] <= last[:, None])
        p, alpha, m_i = exp_scores(s, mask, m_i, outer if SOFTCAP else inner, MASKED)
        return p.to(gl.bfloat16), alpha, m_i, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def _publish(p, m_i, p_shared, m_shared, ready):
    """A block's probabilities and running maximum for the other warpgroup.

    It is done with those before: this one has multiplied, or waited for, what came of them.
    """
    p_shared.store(p)
    m_shared.store(m_i)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _rescale_to_other(m_i, l_i, acc, m_shared, ready, phase):
    """(m_i, l_i, acc) behind the block whose probabilities the other warpgroup has published."""
    mbarrier.wait(ready, phase)
    m_new = m_shared.load(gl.SliceLayout(1, SCORES))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - base)
    return m_new, l_i * alpha, _scaled(acc, alpha)


@gluon.jit
def _scaled(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]


@gluon.jit
def _queries(
    q, q_r, first, rows, NH, q_s, q_h, qr_s, qr_h, to, q_rope, m_shared, both,
    SIDE: gl.constexpr, MULTI_TOKEN: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Queries into shared memory, half of them by each warpgroup; E4M3's factors of the rows."""
    factor = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    if SIDE == 0:
        x_rope = query_rows(q_r, first, rows, NH, qr_s, qr_h, 64, MULTI_TOKEN)
    x = query_rows(q + SIDE * 256, first, rows, NH, q_s, q_h, 256, MULTI_TOKEN)
    if E4M3:
        half, power = half_queries(x, m_shared, both, SIDE)
        factor = gl.convert_layout(power, gl.SliceLayout(1, SCORES))
        to.store(half)
    else:
        to.store(x)
    if SIDE == 0:
        q_rope.store(x_rope)
    fence_async_shared()
    barrier()
    mbarrier.arrive(both, count=1)
    mbarrier.wait(both, 1 if E4M3 else 0)
    return factor


@gluon.jit
def consumer_left(
    q, q_r, length_ptr, out, stats, inner, outer, B, S, NH, total_splits,
    q_b, q_s, q_h, qr_b, qr_s, qr_h, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
    p_shared, m_shared, left_full, right_full, left_empty, right_empty, ready, both,
    COLUMNS: gl.constexpr, L: gl.constexpr, MULTI_TOKEN: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, BATCH: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the even blocks, and the left half of all values."""
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    gdc_wait()  # for what the kernel before wrote, as every role does
    b, length, begin, end, blocks = split_of_cta(length_ptr, B, S, total_splits, SPLIT, BATCH)
    q, q_r = q + b * q_b, q_r + b * qr_b
    first, rows = gl.program_id(0) * 64, S * NH
    row = first + gl.arange(0, 64, layout=S_ROW)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
    l_i = gl.full([64], 0.0, gl.float32, layout=S_ROW)
    acc = gl.full([64, 256], 0.0, gl.float32, layout=VALUES)
    if blocks > 0:
        q_factor = _queries(
            q, q_r, first, rows, NH, q_s, q_h, qr_s, qr_h, q_left.index(0), q_rope.index(0),
            m_shared, both, 0, MULTI_TOKEN, E4M3,
        )  # fmt: skip
        last = (
            length - S + (row // NH if MULTI_TOKEN else row * 0)
        )  # newest key that the row attends to
        pairs = (blocks - 1) // 2
        for i in range(pairs):
            even, odd = _opaque(0), _opaque(1)
            token = _begin_scores(
                even, even, i & 1, q_left, q_right, q_rope, k_left, k_right, k_rope,
                left_full, right_full, COLUMNS, E4M3,
            )  # fmt: skip
            s = _scores(
                token, q_rope.index(even), k_rope.index(even), q_factor, k_scale, even, E4M3
            )
            p, alpha, m_i, l_i = _softmax(
                s, k_scale, even, begin + i * 128, end, last, m_i, l_i, inner, outer,
                MULTI_TOKEN, SOFTCAP, E4M3,
            )  # fmt: skip
            _publish(p, m_i, p_shared.index(even), m_shared.index(even), ready.index(even))
            acc = _scaled(acc, alpha)
            p = gl.convert_layout(p, OPERAND)
            pending = warpgroup_mma(p, k_left.index(even), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[pending, p])
            mbarrier.arrive(left_empty.index(even), count=1)

            m_i, l_i, acc = _rescale_to_other(
                m_i, l_i, acc, m_shared.index(odd), ready.index(odd), i & 1
            )
            _wait_half(left_full, odd, i & 1, COLUMNS)
            pending = warpgroup_mma(p_shared.index(even), k_left.index(odd), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(left_empty.index(odd), count=1)
        token = _begin_scores(
            0, 0, pairs & 1, q_left, q_right, q_rope, k_left, k_right, k_rope,
            left_full, right_full, COLUMNS, E4M3,
        )  # fmt: skip
        s = _scores(token, q_rope.index(0), k_rope.index(0), q_factor, k_scale, 0, E4M3)
        start = begin + pairs * 128
        p, alpha, m_i, l_i = _softmax(
            s, k_scale, 0, start, end, last, m_i, l_i, inner, outer, True, SOFTCAP, E4M3
        )
        _publish(p, m_i, p_shared.index(0), m_shared.index(0), ready.index(0))
        acc = _scaled(acc, alpha)
        if start + 64 > end and not E4M3:
            zeros_behind(k_left.index(0), end - start)
        p = gl.convert_layout(p, OPERAND)
        pending = warpgroup_mma(p, k_left.index(0), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        if start + 64 < end:  # one more block, the other's
            m_i, l_i, acc = _rescale_to_other(
                m_i, l_i, acc, m_shared.index(1), ready.index(1), pairs & 1
            )
            _wait_half(left_full, 1, pairs & 1, COLUMNS)
            if start + 128 > end and not E4M3:
                zeros_behind(k_left.index(1), end - start - 64)
            pending = warpgroup_mma(p_shared.index(0), k_left.index(1), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[pending])
        l_i = _sum_of_both(l_i, m_shared, both, 0, E4M3)
    if SPLIT:
        store_lse(log_sum_exp(m_i, l_i), stats)
    _store(acc, l_i, out, stats, first, rows, blocks, L, SPLIT, 0)


@gluon.jit
def consumer_right(
    q, q_r, length_ptr, out, stats, inner, outer, B, S, NH, total_splits,
    q_b, q_s, q_h, qr_b, qr_s, qr_h, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
    p_shared, m_shared, left_full, right_full, left_empty, right_empty, ready, both,
    COLUMNS: gl.constexpr, L: gl.constexpr, MULTI_TOKEN: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, BATCH: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the odd blocks, and the right half of all values."""
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    gdc_wait()  # for what the kernel before wrote, as every role does
    b, length, begin, end, blocks = split_of_cta(length_ptr, B, S, total_splits, SPLIT, BATCH)
    q, q_r = q + b * q_b, q_r + b * qr_b
    first, rows = gl.program_id(0) * 64, S * NH
    row = first + gl.arange(0, 64, layout=S_ROW)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
    l_i = gl.full([64], 0.0, gl.float32, layout=S_ROW)
    acc = gl.full([64, 256], 0.0, gl.float32, layout=VALUES)
    if blocks > 0:
        q_factor = _queries(
            q, q_r, first, rows, NH, q_s, q_h, qr_s, qr_h, q_right.index(0), q_rope.index(0),
            m_shared, both, 1, MULTI_TOKEN, E4M3,
        )  # fmt: skip
        last = (
            length - S + (row // NH if MULTI_TOKEN else row * 0)
        )  # newest key that the row attends to
        pairs = (blocks - 1) // 2
        for i in range(pairs):
            even, odd = _opaque(0), _opaque(1)
            token = _begin_scores(
                even, odd, i & 1, q_left, q_right, q_rope, k_left, k_right, k_rope,
                left_full, right_full, COLUMNS, E4M3,
            )  # fmt: skip
            s = _scores(token, q_rope.index(even), k_rope.index(odd), q_factor, k_scale, odd, E4M3)
            m_i, l_i, acc = _rescale_to_other(
                m_i, l_i, acc, m_shared.index(even), ready.index(even), i & 1
            )
            _wait_half(right_full, even, i & 1, COLUMNS)
            pending = warpgroup_mma(p_shared.index(even), k_right.index(even), acc, is_async=True)
            p, alpha, m_i, l_i = _softmax(
                s, k_scale, odd, begin + i * 128 + 64, end, last, m_i, l_i, inner, outer,
                MULTI_TOKEN, SOFTCAP, E4M3,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(right_empty.index(even), count=1)

            _publish(p, m_i, p_shared.index(even), m_shared.index(odd), ready.index(odd))
            acc = _scaled(acc, alpha)
            p = gl.convert_layout(p, OPERAND)
            pending = warpgroup_mma(p, k_right.index(odd), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[pending, p])
            mbarrier.arrive(right_empty.index(odd), count=1)
        start = begin + pairs * 128
        phase = pairs & 1
        s = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)
        if start + 64 < end:  # the last block is this one's
            token = _begin_scores(
                0, 1, phase, q_left, q_right, q_rope, k_left, k_right, k_rope,
                left_full, right_full, COLUMNS, E4M3,
            )  # fmt: skip
            s = _scores(token, q_rope.index(0), k_rope.index(1), q_factor, k_scale, 1, E4M3)
        m_i, l_i, acc = _rescale_to_other(m_i, l_i, acc, m_shared.index(0), ready.index(0), phase)
        _wait_half(right_full, 0, phase, COLUMNS)
        if start + 64 > end and not E4M3:
            zeros_behind(k_right.index(0), end - start)
        pending = warpgroup_mma(p_shared.index(0), k_right.index(0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        barrier()
        if start + 64 < end:
            p, alpha, m_i, l_i = _softmax(
                s, k_scale, 1, start + 64, end, last, m_i, l_i, inner, outer,
                True, SOFTCAP, E4M3,
            )  # fmt: skip
            _publish(p, m_i, p_shared.index(0), m_shared.index(1), ready.index(1))
            acc = _scaled(acc, alpha)
            if start + 128 > end and not E4M3:
                zeros_behind(k_right.index(1), end - start - 64)
            p = gl.convert_layout(p, OPERAND)
            pending = warpgroup_mma(p, k_right.index(1), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        l_i = _sum_of_both(l_i, m_shared, both, 1, E4M3)
    _store(acc, l_i, out, stats, first, rows, blocks, L, SPLIT, 1)


@gluon.jit
def _sum_of_both(l_i, m_shared, both, SIDE: gl.constexpr, E4M3: gl.constexpr):
    """``l_i`` of both warpgroups' blocks."""
    barrier()  # all threads have read what this overwrites: the maximum that the other left
    m_shared.index(1 - SIDE).store(l_i)
    barrier()
    mbarrier.arrive(both, count=1)
    mbarrier.wait(both, 0 if E4M3 else 1)
    return m_shared.index(0).load(l_i.type.layout) + m_shared.index(1).load(l_i.type.layout)


@gluon.jit
def _store(
    acc, l_i, out, stats, first, rows, blocks, L: gl.constexpr, SPLIT: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """A half of the result, or of a split's."""
    inverse = gl.convert_layout(1 / gl.where(l_i == 0, 1.0, l_i), gl.SliceLayout(1, VALUES))
    if SPLIT:
        if blocks > 0:  # else nobody reads it
            store_split(acc, inverse, out, stats, SIDE)
    else:
        split_idx = gl.program_id(1).to(gl.int64)  # a sequence
        row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
        c = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, VALUES))
        to = out + split_idx * rows * L + row[:, None] * L + c[None, :]
        y = acc * inverse[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=(row < rows)[:, None])
