"""Hopper's causal prefill: what each of the two consumer warpgroups does for its 64 queries.

It begins the scores of block j together with the values of the block before it, and takes the
exponentials of j while the latter are multiplied. The two warpgroups ping-pong: one begins its
products while the other is at its exponentials (FlashAttention-3, arXiv 2407.08608).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.tile_scheduler import handed_out
from ..online_softmax import capped, exp_scores, with_sink
from .prefill_loads import STAGES, tile_at


def _lines(DV: int) -> gl.constexpr:
    """64 rows of DV columns as the products leave them, but a lane's are eight beside each other.

    Four lanes, which had two columns each of every eight, have exchanged them among themselves.
    """
    columns = [[0, 32], [0, 64], [0, 128]][: DV.bit_length() - 6]
    return gl.constexpr(
        gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], *columns, [8, 0]],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, DV],
        )
    )


LINES_64, LINES_128, LINES_256 = (_lines(DV) for DV in (64, 128, 256))


@gluon.jit
def _barrier(ASM: gl.constexpr):
    gl.inline_asm_elementwise(
        ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _pingpong_wait(WG: gl.constexpr):
    """Waits until the other warpgroup has begun its products: named barriers of 256 threads."""
    _barrier("bar.sync 9, 256; mov.b32 $0, $1;" if WG == 0 else "bar.sync 10, 256; mov.b32 $0, $1;")


@gluon.jit
def _pingpong_signal(WG: gl.constexpr):
    _barrier(
        "bar.arrive 10, 256; mov.b32 $0, $1;" if WG == 0 else "bar.arrive 9, 256; mov.b32 $0, $1;"
    )


@gluon.jit
def _scores(q, q_rope, k, k_rope, zeros, R: gl.constexpr):
    """Begins the products of all rows with one block of keys."""
    if R > 0:
        s = warpgroup_mma(q_rope, k_rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
        return warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
    else:
        return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    s,
    start,
    at_q,
    keys,
    m_i,
    l_i,
    inner,
    outer,
    window,
    KEYS: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """``online_softmax.softmax_step`` of the block of keys from ``start`` on."""
    if SOFTCAP:
        s = capped(s, inner)
    mask = s  # not read
    if MASKED:
        n = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        mask = (n < keys)[None, :] & (n[None, :] <= at_q[:, None])
        if WINDOW:
            mask = mask & (n[None, :] > at_q[:, None] - window)
    p, alpha, m_i = exp_scores(s, mask, m_i, outer if SOFTCAP else inner, MASKED)
    return p, alpha, m_i, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def _computed_here(l_i):
    """``l_i``, computed before any wait that follows.

    ptxas hoists a wait for products before exponentials that do not need them, and nothing runs
    in parallel with the products any more. It does not hoist it over a store to shared memory that
    may be: this one does if the sum of the exponentials is negative, which it never is. (A trap
    instead of the store makes it wait after every single product.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; .reg .u32 a; setp.lt.f32 q, $1, 0f00000000; mov.u32 a, 0;"
        " @q st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f",
        [l_i],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _operand(p, VALUES: gl.constexpr):
    """Probabilities as operand A of the product with values."""
    return gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, VALUES, 2))


@gluon.jit
def _steps(
    q,
    q_rope,
    ks,
    k_ropes,
    vs,
    zeros,
    k_full,
    k_empty,
    v_full,
    v_empty,
    p,
    m_i,
    l_i,
    acc,
    c,
    n,
    count,
    at_q,
    keys,
    inner,
    outer,
    window,
    R: gl.constexpr,
    KEYS: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WG: gl.constexpr,
):
    """``count`` blocks from ``n`` downwards: their scores, and the values of the one before."""
    VALUES: gl.constexpr = acc.type.layout
    for _ in range(count):
        v_at = c % STAGES
        v_phase = c // STAGES & 1
        c += 1
        k_at = c % STAGES
        mbarrier.wait(k_full.index(k_at), c // STAGES & 1)
        _pingpong_wait(WG)
        token = _scores(q, q_rope, ks.index(k_at), k_ropes.index(k_at), zeros, R)
        p = _operand(p, VALUES)
        mbarrier.wait(v_full.index(v_at), v_phase)
        pending = warpgroup_mma(p, vs.index(v_at), acc, is_async=True)
        _pingpong_signal(WG)
        s = warpgroup_mma_wait(1, deps=[token])
        mbarrier.arrive(k_empty.index(k_at), count=1)
        p_next, alpha, m_i, l_i = _softmax(
            s,
            n * KEYS,
            at_q,
            keys,
            m_i,
            l_i,
            inner,
            outer,
            window,
            KEYS,
            MASKED,
            WINDOW,
            SOFTCAP,
        )
        l_i = _computed_here(l_i)
        acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        mbarrier.arrive(v_empty.index(v_at), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]
        p = p_next
        n -= 1
    return p, m_i, l_i, acc, c, n


@gluon.jit
def _store(acc, out, q_row, i, queries, o_t, DV: gl.constexpr):
    """64 rows of the result. Lanes exchange columns first, to write 16 bytes each."""
    L: gl.constexpr = LINES_64 if DV == 64 else LINES_128 if DV == 128 else LINES_256
    y = gl.convert_layout(acc.to(out.dtype.element_ty), L)
    row = i + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    col = gl.arange(0, DV, layout=gl.SliceLayout(0, L))
    to = out + ((q_row + row).to(gl.int64) * o_t)[:, None] + col[None, :]
    gl.store(to, y, mask=(row < queries)[:, None])


@gluon.jit
def consumer(
    q_start_ptr,
    q_length_ptr,
    k_length_ptr,
    out_ptr,
    sink_ptr,
    inner,
    outer,
    window,
    o_t,
    o_h,
    B,
    blocks,
    tiles,
    at_a_time,
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
    nexts,
    n_full,
    n_empty,
    DV: gl.constexpr,
    R: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WG: gl.constexpr,
):
    """What each of the two warpgroups does for its 64 queries."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    V_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    if WG == 1:
        _pingpong_signal(WG)  # the other begins
    q, q_rope = qs.index(WG), q_ropes.index(WG)
    zeros = gl.full([64, KEYS], 0.0, gl.float32, layout=SCORES)
    c = 0
    t = 0
    n_tile = 0
    tile = gl.program_id(0)
    while tile < tiles:
        b, head, i, queries, keys, lo, hi = tile_at(
            tile, q_length_ptr, k_length_ptr, window, B, blocks, at_a_time, KEYS, WINDOW
        )
        if i < queries:
            i += 64 * WG
            past = keys - queries  # keys before the first query
            acc = gl.full([64, DV], 0.0, gl.float32, layout=VALUES)
            scale = gl.full([64], 1.0, gl.float32, layout=S_ROW)
            if lo < hi:
                at_q = past + i + gl.arange(0, 64, layout=S_ROW)
                m_i = gl.full([64], float("-inf"), gl.float32, layout=S_ROW)
                l_i = gl.full([64], 0.0, gl.float32, layout=S_ROW)
                # Blocks from mid on are cut by the diagonal or the end, those before low by the
                # window's edge.
                mid = gl.maximum(0, gl.minimum(keys, past + i + 1)) // KEYS
                mid = gl.maximum(lo, gl.minimum(mid, hi - 1))
                low = lo
                if WINDOW:
                    low = gl.cdiv(gl.maximum(0, past + i + 64 - window), KEYS)
                    low = gl.minimum(gl.maximum(low, lo), mid)
                mbarrier.wait(q_full, t & 1)
                t += 1
                k_at = c % STAGES
                mbarrier.wait(k_full.index(k_at), c // STAGES & 1)
                _pingpong_wait(WG)
                token = _scores(q, q_rope, ks.index(k_at), k_ropes.index(k_at), zeros, R)
                _pingpong_signal(WG)
                s = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(k_empty.index(k_at), count=1)
                p, _, m_i, l_i = _softmax(
                    s,
                    (hi - 1) * KEYS,
                    at_q,
                    keys,
                    m_i,
                    l_i,
                    inner,
                    outer,
                    window,
                    KEYS,
                    True,
                    WINDOW,
                    SOFTCAP,
                )
                n = hi - 2
                p, m_i, l_i, acc, c, n = _steps(
                    q,
                    q_rope,
                    ks,
                    k_ropes,
                    vs,
                    zeros,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    p,
                    m_i,
                    l_i,
                    acc,
                    c,
                    n,
                    hi - 1 - mid,
                    at_q,
                    keys,
                    inner,
                    outer,
                    window,
                    R,
                    KEYS,
                    True,
                    WINDOW,
                    SOFTCAP,
                    WG,
                )
                p, m_i, l_i, acc, c, n = _steps(
                    q,
                    q_rope,
                    ks,
                    k_ropes,
                    vs,
                    zeros,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    p,
                    m_i,
                    l_i,
                    acc,
                    c,
                    n,
                    mid - low,
                    at_q,
                    keys,
                    inner,
                    outer,
                    window,
                    R,
                    KEYS,
                    False,
                    WINDOW,
                    SOFTCAP,
                    WG,
                )
                if WINDOW:
                    p, m_i, l_i, acc, c, n = _steps(
                        q,
                        q_rope,
                        ks,
                        k_ropes,
                        vs,
                        zeros,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        p,
                        m_i,
                        l_i,
                        acc,
                        c,
                        n,
                        low - lo,
                        at_q,
                        keys,
                        inner,
                        outer,
                        window,
                        R,
                        KEYS,
                        True,
                        WINDOW,
                        SOFTCAP,
                        WG,
                    )
                mbarrier.arrive(q_empty, count=1)
                v_at = c % STAGES
                mbarrier.wait(v_full.index(v_at), c // STAGES & 1)
                c += 1
                p = _operand(p, VALUES)
                pending = warpgroup_mma(p, vs.index(v_at), acc, is_async=True)
                acc, p = warpgroup_mma_wait(0, deps=[pending, p])
                mbarrier.arrive(v_empty.index(v_at), count=1)
                if sink_ptr is not None:
                    l_i = with_sink(gl.load(sink_ptr + head), m_i, l_i)
                scale = 1 / gl.where(l_i == 0, 1.0, l_i)
            acc = acc * gl.convert_layout(scale, V_ROW)[:, None]
            q_row = gl.load(q_start_ptr + b)
            _store(acc, out_ptr + head * o_h, q_row, i, queries, o_t, DV)
        tile = handed_out(nexts, n_full, n_empty, n_tile)
        n_tile += 1
    if WG == 0:
        _pingpong_wait(WG)  # for the other's last signal
