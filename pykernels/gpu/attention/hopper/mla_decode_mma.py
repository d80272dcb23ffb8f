"""The two warpgroups that multiply in ``mla_decode_hopper``.

Each has half of the result's columns, and computes scores and shares of every second block: the
left one of the even blocks, the right one of the odd ones. So while one takes exponentials, the
tensor cores have the other's scores, or the values of the block before. Shares and largest scores
of a block go to the other through shared memory. Both keep the running maximum of all rows, and
each the sum of its own blocks' shares.
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
from .mla_decode_fp8 import half_queries, scaled_softmax
from .mla_decode_loads import query_rows, share, zeros_behind
from .mla_split_kv import store_lse, store_part

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _fresh(number):
    """``number``, of which the compiler knows nothing.

    Buffers at constant places have constant descriptors, a hundred, which it keeps in registers
    round the loop that are not there.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _there(full, turn, phase, COLUMNS: gl.constexpr):
    """Waits for half a block."""
    for c in gl.static_range(256 // COLUMNS):
        mbarrier.wait(full.index(turn * (256 // COLUMNS) + c), phase)


@gluon.jit
def _begin_scores(
    zero, turn, phase, q_left, q_right, q_rope, k_left, k_right, k_rope, left_full, right_full,
    COLUMNS: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Begins the products of the queries with a block of keys, each piece once it is there."""
    PIECES: gl.constexpr = 256 // COLUMNS
    s = gl.full([64, 64], 0.0, gl.float32, layout=SCORES)
    for c in gl.static_range(PIECES):
        mbarrier.wait(left_full.index(turn * PIECES + c), phase)
        if c == 0 and not E4M3:  # else it comes last
            k = k_rope.index(turn).permute((1, 0))
            s = warpgroup_mma(q_rope.index(zero), k, s, use_acc=False, is_async=True)
        q = q_left.index(zero).slice(c * COLUMNS, COLUMNS, dim=1)
        k = k_left.index(turn).slice(c * COLUMNS, COLUMNS, dim=1).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=not (E4M3 and c == 0), is_async=True)
    for c in gl.static_range(PIECES):
        mbarrier.wait(right_full.index(turn * PIECES + c), phase)
        q = q_right.index(zero).slice(c * COLUMNS, COLUMNS, dim=1)
        k = k_right.index(turn).slice(c * COLUMNS, COLUMNS, dim=1).permute((1, 0))
        s = warpgroup_mma(q, k, s, is_async=True)
    return s


@gluon.jit
def _scores(token, q_rope, k_rope, q_factor, k_scale, turn, E4M3: gl.constexpr):
    """A block's scores, once they are there; the rotated part is not scaled as E4M3 is."""
    s = warpgroup_mma_wait(0, deps=[token])
    if E4M3:
        scale = k_scale.index(turn).load(gl.SliceLayout(0, SCORES))
        s = s * (q_factor[:, None] * scale[None, :])
        s = warpgroup_mma(q_rope, k_rope.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    return s


@gluon.jit
def _shares(
    s, k_scale, turn, start, end, last, m, total, inner, outer,
    MASKED: gl.constexpr, SOFTCAP: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """(shares as the tensor cores take them, factor of the past, m, total) of a block."""
    if E4M3:
        return scaled_softmax(
            s, k_scale, turn, start, end, last, m, total, inner, outer, MASKED, SOFTCAP
        )
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
def _publish(p, m, shares, tops, ready):
    """A block's shares and largest scores for the other warpgroup.

    It is done with those before: this one has multiplied, or waited for, what came of them.
    """
    shares.store(p)
    tops.store(m)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _others(m, total, acc, tops, ready, phase):
    """(m, total, acc) behind the block whose shares the other warpgroup has published."""
    mbarrier.wait(ready, phase)
    top = tops.load(gl.SliceLayout(1, SCORES))
    base = gl.where(top == float("-inf"), 0.0, top)
    alpha = gl.exp2(m - base)
    return top, total * alpha, _scaled(acc, alpha)


@gluon.jit
def _scaled(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]


@gluon.jit
def _queries(
    q, q_r, first, rows, NH, q_s, q_h, qr_s, qr_h, to, q_rope, tops, both,
    SIDE: gl.constexpr, MANY: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Queries into shared memory, half of them by each warpgroup; E4M3's factors of the rows."""
    factor = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    if SIDE == 0:
        x_rope = query_rows(q_r, first, rows, NH, qr_s, qr_h, 64, MANY)
    x = query_rows(q + SIDE * 256, first, rows, NH, q_s, q_h, 256, MANY)
    if E4M3:
        half, power = half_queries(x, tops, both, SIDE)
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
def left(
    q, q_r, length_ptr, out, stats, inner, outer, B, S, NH, slots,
    q_b, q_s, q_h, qr_b, qr_s, qr_h, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
    shares, tops, left_full, right_full, left_empty, right_empty, ready, both,
    COLUMNS: gl.constexpr, L: gl.constexpr, MANY: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, BATCH: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Scores and shares of the even blocks, and the left half of all values."""
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    gdc_wait()  # for what the kernel before wrote, as every role does
    b, length, begin, end, blocks = share(length_ptr, B, S, slots, SPLIT, BATCH)
    q, q_r = q + b * q_b, q_r + b * qr_b
    first, rows = gl.program_id(0) * 64, S * NH
    row = first + gl.arange(0, 64, layout=S_ROW)
    m = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
    total = gl.full([64], 0.0, gl.float32, layout=S_ROW)
    acc = gl.full([64, 256], 0.0, gl.float32, layout=VALUES)
    if blocks > 0:
        q_factor = _queries(
            q, q_r, first, rows, NH, q_s, q_h, qr_s, qr_h, q_left.index(0), q_rope.index(0),
            tops, both, 0, MANY, E4M3,
        )  # fmt: skip
        last = length - S + (row // NH if MANY else row * 0)  # newest key that the row sees
        pairs = (blocks - 1) // 2
        for i in range(pairs):
            even, odd = _fresh(0), _fresh(1)
            token = _begin_scores(
                even, even, i & 1, q_left, q_right, q_rope, k_left, k_right, k_rope,
                left_full, right_full, COLUMNS, E4M3,
            )  # fmt: skip
            s = _scores(
                token, q_rope.index(even), k_rope.index(even), q_factor, k_scale, even, E4M3
            )
            p, alpha, m, total = _shares(
                s, k_scale, even, begin + i * 128, end, last, m, total, inner, outer,
                MANY, SOFTCAP, E4M3,
            )  # fmt: skip
            _publish(p, m, shares.index(even), tops.index(even), ready.index(even))
            acc = _scaled(acc, alpha)
            p = gl.convert_layout(p, OPERAND)
            pending = warpgroup_mma(p, k_left.index(even), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[pending, p])
            mbarrier.arrive(left_empty.index(even), count=1)

            m, total, acc = _others(m, total, acc, tops.index(odd), ready.index(odd), i & 1)
            _there(left_full, odd, i & 1, COLUMNS)
            pending = warpgroup_mma(shares.index(even), k_left.index(odd), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(left_empty.index(odd), count=1)
        token = _begin_scores(
            0, 0, pairs & 1, q_left, q_right, q_rope, k_left, k_right, k_rope,
            left_full, right_full, COLUMNS, E4M3,
        )  # fmt: skip
        s = _scores(token, q_rope.index(0), k_rope.index(0), q_factor, k_scale, 0, E4M3)
        start = begin + pairs * 128
        p, alpha, m, total = _shares(
            s, k_scale, 0, start, end, last, m, total, inner, outer, True, SOFTCAP, E4M3
        )
        _publish(p, m, shares.index(0), tops.index(0), ready.index(0))
        acc = _scaled(acc, alpha)
        if start + 64 > end and not E4M3:
            zeros_behind(k_left.index(0), end - start)
        p = gl.convert_layout(p, OPERAND)
        pending = warpgroup_mma(p, k_left.index(0), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        if start + 64 < end:  # one more block, the other's
            m, total, acc = _others(m, total, acc, tops.index(1), ready.index(1), pairs & 1)
            _there(left_full, 1, pairs & 1, COLUMNS)
            if start + 128 > end and not E4M3:
                zeros_behind(k_left.index(1), end - start - 64)
            pending = warpgroup_mma(shares.index(0), k_left.index(1), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[pending])
        total = _of_both(total, tops, both, 0, E4M3)
    if SPLIT:
        z = gl.where(total == 0, float("-inf"), m + gl.log2(gl.where(total == 0, 1.0, total)))
        store_lse(z, stats)
    _store(acc, total, out, stats, first, rows, blocks, L, SPLIT, 0)


@gluon.jit
def right(
    q, q_r, length_ptr, out, stats, inner, outer, B, S, NH, slots,
    q_b, q_s, q_h, qr_b, qr_s, qr_h, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
    shares, tops, left_full, right_full, left_empty, right_empty, ready, both,
    COLUMNS: gl.constexpr, L: gl.constexpr, MANY: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, BATCH: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Scores and shares of the odd blocks, and the right half of all values."""
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    gdc_wait()  # for what the kernel before wrote, as every role does
    b, length, begin, end, blocks = share(length_ptr, B, S, slots, SPLIT, BATCH)
    q, q_r = q + b * q_b, q_r + b * qr_b
    first, rows = gl.program_id(0) * 64, S * NH
    row = first + gl.arange(0, 64, layout=S_ROW)
    m = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
    total = gl.full([64], 0.0, gl.float32, layout=S_ROW)
    acc = gl.full([64, 256], 0.0, gl.float32, layout=VALUES)
    if blocks > 0:
        q_factor = _queries(
            q, q_r, first, rows, NH, q_s, q_h, qr_s, qr_h, q_right.index(0), q_rope.index(0),
            tops, both, 1, MANY, E4M3,
        )  # fmt: skip
        last = length - S + (row // NH if MANY else row * 0)  # newest key that the row sees
        pairs = (blocks - 1) // 2
        for i in range(pairs):
            even, odd = _fresh(0), _fresh(1)
            token = _begin_scores(
                even, odd, i & 1, q_left, q_right, q_rope, k_left, k_right, k_rope,
                left_full, right_full, COLUMNS, E4M3,
            )  # fmt: skip
            s = _scores(token, q_rope.index(even), k_rope.index(odd), q_factor, k_scale, odd, E4M3)
            m, total, acc = _others(m, total, acc, tops.index(even), ready.index(even), i & 1)
            _there(right_full, even, i & 1, COLUMNS)
            pending = warpgroup_mma(shares.index(even), k_right.index(even), acc, is_async=True)
            p, alpha, m, total = _shares(
                s, k_scale, odd, begin + i * 128 + 64, end, last, m, total, inner, outer,
                MANY, SOFTCAP, E4M3,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(right_empty.index(even), count=1)

            _publish(p, m, shares.index(even), tops.index(odd), ready.index(odd))
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
        m, total, acc = _others(m, total, acc, tops.index(0), ready.index(0), phase)
        _there(right_full, 0, phase, COLUMNS)
        if start + 64 > end and not E4M3:
            zeros_behind(k_right.index(0), end - start)
        pending = warpgroup_mma(shares.index(0), k_right.index(0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pending])
        barrier()
        if start + 64 < end:
            p, alpha, m, total = _shares(
                s, k_scale, 1, start + 64, end, last, m, total, inner, outer,
                True, SOFTCAP, E4M3,
            )  # fmt: skip
            _publish(p, m, shares.index(0), tops.index(1), ready.index(1))
            acc = _scaled(acc, alpha)
            if start + 128 > end and not E4M3:
                zeros_behind(k_right.index(1), end - start - 64)
            p = gl.convert_layout(p, OPERAND)
            pending = warpgroup_mma(p, k_right.index(1), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        total = _of_both(total, tops, both, 1, E4M3)
    _store(acc, total, out, stats, first, rows, blocks, L, SPLIT, 1)


@gluon.jit
def _of_both(total, tops, both, SIDE: gl.constexpr, E4M3: gl.constexpr):
    """The sum of both warpgroups' shares."""
    barrier()  # all threads have read what they overwrite: largest scores that the other left
    tops.index(1 - SIDE).store(total)
    barrier()
    mbarrier.arrive(both, count=1)
    mbarrier.wait(both, 0 if E4M3 else 1)
    return tops.index(0).load(total.type.layout) + tops.index(1).load(total.type.layout)


@gluon.jit
def _store(
    acc, total, out, stats, first, rows, blocks, L: gl.constexpr, SPLIT: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """A half of the result, or of a part's."""
    inverse = gl.convert_layout(1 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, VALUES))
    if SPLIT:
        if blocks > 0:  # else nobody reads it
            store_part(acc, inverse, out, stats, SIDE)
    else:
        slot = gl.program_id(1).to(gl.int64)  # a sequence
        row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
        c = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, VALUES))
        to = out + slot * rows * L + row[:, None] * L + c[None, :]
        y = acc * inverse[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=(row < rows)[:, None])
