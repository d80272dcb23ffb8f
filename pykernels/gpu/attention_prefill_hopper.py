"""Causal prefill written out for Hopper: 128 queries a program, a warpgroup for each 64.

The same function as ``attention_prefill``'s Triton kernel for bf16 keys, in Gluon, where we say
which products still run while shares are computed: the scores of block j and the values of block
j - 1 are begun together, and the exponentials of j are taken while the latter are multiplied
(FlashAttention-3, arXiv 2407.08608, 3.2). Triton waits for both.
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

from .gluon_names import async_load, barrier

ROWS, WARPS = 128, 8


@gluon.jit
def _lookup(table, start, keys, width: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Pages of ``KEYS`` keys, laid out as the rows that ``_load`` copies; 0 without pages.

    Asked for a block ahead: a copy that waits for its addresses would begin too late.
    """
    if PAGE > 0:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [8, 1], [1, 0])
        n = gl.minimum(start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, L)), keys - 1)
        return gl.load(table + n // PAGE)
    else:
        return 0


@gluon.jit
def _load(
    base, first_row, pages, stride, start, keys, to,
    width: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Begins the copy of ``KEYS`` rows of k or v; behind the last key its row again: no NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [8, 1], [1, 0])
    n = gl.minimum(start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, L)), keys - 1)
    if PAGE > 0:
        row = pages.to(gl.int64) * PAGE + n % PAGE
    else:
        row = first_row + n
    c = gl.arange(0, width, layout=gl.SliceLayout(0, L))
    async_load(to, base + (row * stride)[:, None] + c[None, :])


@gluon.jit
def _queries(base, row, stride, i, queries, to, width: gl.constexpr):
    """128 query rows into shared memory, zeros behind the last."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [8, 1], [1, 0])
    n = i + gl.arange(0, 128, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, width, layout=gl.SliceLayout(0, L))
    at = ((row + n) * stride)[:, None] + c[None, :]
    to.store(gl.load(base + at, mask=(n < queries)[:, None], other=0.0))


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
    s, start, at_q, keys, m, total, inner, outer, window,
    KEYS: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """(shares in bf16, factor of the past, m, total) of one block."""
    if SOFTCAP:
        s = 1 - 2 / (gl.exp2(s * inner) + 1)
        factor = outer
    else:
        factor = inner
    if MASKED:
        n = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        seen = (n < keys)[None, :] & (n[None, :] <= at_q[:, None])
        if WINDOW:
            seen = seen & (n[None, :] > at_q[:, None] - window)
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * factor)
    base = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s * factor - base[:, None])
    alpha = gl.exp2(m - base)
    total = total * alpha + gl.sum(p, 1)
    return gl.convert_layout(p.to(gl.bfloat16), OPERAND), alpha, top, total


@gluon.jit
def _settled(total):
    """``total``, computed before any wait that follows.

    ptxas hoists a wait for products before exponentials that do not need them, and nothing runs
    beside the products any more. It does not hoist it over a store to shared memory that may be:
    this one does if the sum of the exponentials is negative, which it never is. (A trap instead of
    the store makes it wait after every single product.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; .reg .u32 a; setp.lt.f32 q, $1, 0f00000000; mov.u32 a, 0;"
        " @q st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _steps(
    q, q_rope, ks, k_ropes, vs, zeros, k_ptr, k_rope_ptr, v_ptr, table, k_row, k_t, kr_t, v_t,
    p, m, total, acc, pages, next_pages, first, start, stop, end, keys, at_q, inner, outer, window,
    PAGE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, KEYS: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Blocks ``start .. stop``: each one's scores with the values of the block before it.

    ``first`` is the sequence's first block (in buffer 0), ``end`` is behind its last key; ``pages``
    and ``next_pages`` are those of the block at ``start`` and of the one behind it.
    """
    VALUES: gl.constexpr = acc.type.layout
    for at in range(start, stop, KEYS):
        turn = ((at - first) // KEYS) & 1
        async_copy.wait_group(0)
        barrier()  # k of this block and v of the last are there; the other buffers are read
        fence_async_shared()
        token = _scores(q, q_rope, ks.index(turn), k_ropes.index(turn), zeros, R)
        pending = warpgroup_mma(p, vs.index(turn ^ 1), acc, is_async=True)
        if at + KEYS < end:
            to = ks.index(turn ^ 1)
            _load(k_ptr, k_row, next_pages, k_t, at + KEYS, keys, to, D, KEYS, PAGE)
            if R > 0:
                to = k_ropes.index(turn ^ 1)
                _load(k_rope_ptr, k_row, 0, kr_t, at + KEYS, keys, to, R, KEYS, 0)
        _load(v_ptr, k_row, pages, v_t, at, keys, vs.index(turn), DV, KEYS, PAGE)
        async_copy.commit_group()
        if PAGE > 0:
            pages = next_pages
            next_pages = _lookup(table, at + 2 * KEYS, keys, D, KEYS, PAGE)
        s = warpgroup_mma_wait(1, deps=[token])
        p_next, alpha, m, total = _softmax(
            s, at, at_q, keys, m, total, inner, outer, window,
            KEYS, MASKED, WINDOW, SOFTCAP, gl.DotOperandLayout(0, VALUES, 2),
        )  # fmt: skip
        total = _settled(total)
        acc, p = warpgroup_mma_wait(0, deps=[pending, p])
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]
        p = p_next
    return p, m, total, acc, pages, next_pages


@gluon.jit
def prefill_hopper(
    q_ptr, q_rope_ptr, k_ptr, k_rope_ptr, v_ptr, q_start_ptr, q_length_ptr, k_start_ptr,
    k_length_ptr, table_ptr, out_ptr, inner, outer, window, table_stride,
    q_t, q_h, qr_t, qr_h, k_t, k_h, kr_t, v_t, v_h, o_t, o_h,
    G: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr,
    KEYS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    V_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)

    b, head = gl.program_id(2), gl.program_id(1)
    queries = gl.load(q_length_ptr + b)
    # The last queries see the most keys: the longest programs start first.
    i = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    if i >= queries:
        return
    keys = gl.load(k_length_ptr + b)
    q_row = gl.load(q_start_ptr + b).to(gl.int64)
    k_row = q_row  # of no use with pages
    table = table_ptr
    if PAGE > 0:
        table += b.to(gl.int64) * table_stride
    else:
        k_row = gl.load(k_start_ptr + b).to(gl.int64)
    past = keys - queries  # keys before the first query
    end = gl.minimum(keys, past + i + 128)  # behind the last key that any row sees
    whole = gl.maximum(0, gl.minimum(keys, past + i + 1)) // KEYS * KEYS  # all rows see those
    begin = 0
    clear = 0  # from here on no row's window cuts
    if WINDOW:
        begin = gl.maximum(0, past + i + 1 - window) // KEYS * KEYS
        clear = gl.maximum(0, past + i + 128 - window + KEYS - 1) // KEYS * KEYS

    v_row = i + gl.arange(0, 128, layout=V_ROW)
    c = gl.arange(0, DV, layout=gl.SliceLayout(0, VALUES))
    out = out_ptr + ((q_row + v_row) * o_t + head * o_h)[:, None] + c[None, :]
    o_mask = (v_row < queries)[:, None]
    acc = gl.full([128, DV], 0.0, gl.float32, layout=VALUES)
    if begin >= end:  # no key to see
        gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=o_mask)
        return

    q = gl.allocate_shared_memory(gl.bfloat16, [128, D], SHARED)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, D], SHARED)
    vs = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, DV], SHARED)
    q_rope, k_ropes = q, ks  # of no use without a rotated part
    if R > 0:
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [128, R], SHARED)
        k_ropes = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, R], SHARED)
    k_ptr += (head // G) * k_h
    v_ptr += (head // G) * v_h
    pages = _lookup(table, begin, keys, D, KEYS, PAGE)
    next_pages = _lookup(table, begin + KEYS, keys, D, KEYS, PAGE)
    _load(k_ptr, k_row, pages, k_t, begin, keys, ks.index(0), D, KEYS, PAGE)
    if R > 0:
        _load(k_rope_ptr, k_row, 0, kr_t, begin, keys, k_ropes.index(0), R, KEYS, 0)
    async_copy.commit_group()
    _queries(q_ptr + head * q_h, q_row, q_t, i, queries, q, D)
    if R > 0:
        _queries(q_rope_ptr + head * qr_h, q_row, qr_t, i, queries, q_rope, R)
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()  # the tensor cores read through another path than threads write

    at_q = past + i + gl.arange(0, 128, layout=S_ROW)
    m = gl.full([128], float("-inf"), gl.float32, layout=S_ROW)
    total = gl.full([128], 0.0, gl.float32, layout=S_ROW)
    zeros = gl.full([128, KEYS], 0.0, gl.float32, layout=SCORES)
    token = _scores(q, q_rope, ks.index(0), k_ropes.index(0), zeros, R)
    if begin + KEYS < end:
        _load(k_ptr, k_row, next_pages, k_t, begin + KEYS, keys, ks.index(1), D, KEYS, PAGE)
        if R > 0:
            _load(k_rope_ptr, k_row, 0, kr_t, begin + KEYS, keys, k_ropes.index(1), R, KEYS, 0)
    _load(v_ptr, k_row, pages, v_t, begin, keys, vs.index(0), DV, KEYS, PAGE)
    async_copy.commit_group()
    if PAGE > 0:
        pages = next_pages
        next_pages = _lookup(table, begin + 2 * KEYS, keys, D, KEYS, PAGE)
    s = warpgroup_mma_wait(0, deps=[token])
    p, _, m, total = _softmax(
        s, begin, at_q, keys, m, total, inner, outer, window,
        KEYS, True, WINDOW, SOFTCAP, OPERAND,
    )  # fmt: skip
    start = begin + KEYS
    if WINDOW:
        stop = gl.maximum(start, gl.minimum(clear, whole))
        p, m, total, acc, pages, next_pages = _steps(
            q, q_rope, ks, k_ropes, vs, zeros, k_ptr, k_rope_ptr, v_ptr, table, k_row, k_t,
            kr_t, v_t, p, m, total, acc, pages, next_pages, begin, start, stop, end, keys, at_q,
            inner, outer, window, PAGE, D, DV, R, KEYS, True, WINDOW, SOFTCAP,
        )  # fmt: skip
        start = stop
    stop = gl.maximum(start, whole)
    p, m, total, acc, pages, next_pages = _steps(
        q, q_rope, ks, k_ropes, vs, zeros, k_ptr, k_rope_ptr, v_ptr, table, k_row, k_t, kr_t,
        v_t, p, m, total, acc, pages, next_pages, begin, start, stop, end, keys, at_q,
        inner, outer, window, PAGE, D, DV, R, KEYS, False, WINDOW, SOFTCAP,
    )  # fmt: skip
    p, m, total, acc, pages, next_pages = _steps(
        q, q_rope, ks, k_ropes, vs, zeros, k_ptr, k_rope_ptr, v_ptr, table, k_row, k_t, kr_t,
        v_t, p, m, total, acc, pages, next_pages, begin, stop, end, end, keys, at_q,
        inner, outer, window, PAGE, D, DV, R, KEYS, True, WINDOW, SOFTCAP,
    )  # fmt: skip
    turn = (gl.cdiv(end - begin, KEYS) - 1) & 1  # of the last block
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    pending = warpgroup_mma(p, vs.index(turn), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[pending])
    scale = 1 / gl.where(total == 0, 1.0, total)
    acc = acc * gl.convert_layout(scale, V_ROW)[:, None]
    gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=o_mask)
