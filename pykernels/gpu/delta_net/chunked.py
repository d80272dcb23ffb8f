"""The gated delta rule in chunks of 64 tokens: what needs no state, the scan, and the outputs.

With normed keys K, scaled queries Q, and G the sums of g in a chunk, its deltas are those of a
triangular system (the WY form of "Gated Delta Networks", arXiv 2412.06464, section 3.3):

    (I + A) delta = beta (V - e^G K S),  A_ij = beta_i e^(G_i - G_j) k_i k_j for j < i

`within_chunks` inverts I + A, and multiplies the inverse with beta V and with beta e^G K: U and W,
for all chunks at once. So two products a chunk are left that wait for each other, those of
`scan_chunks`: delta = U - W S, and the next chunk's state. `outputs_of_chunks`, again for all at
once, reads the states and the deltas with the queries.

Norms are factors behind the products, so that keys and queries are never rounded. All sums are
float32; of inputs in 16 bits the other operand of a product, U, W, deltas and the states in front
of chunks are rounded to them, else products are of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import block_of, first_block


@triton.jit
def _product(a, b, kind: tl.constexpr):
    """``a @ b`` of operands rounded to a dtype, summed in float32."""
    return tl.dot(a.to(kind), b.to(kind), input_precision="ieee")


@triton.jit
def _inverse_norms(x, eps):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def _inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower [64, 64]: by rows in blocks of 16, then pairs of blocks.

    With B the inverses of diagonal blocks and A2 what lies left of them, that of both together is
    B - B A2 B. Powers of A, which need no rows, grow beyond all bounds where keys are alike.
    """
    block = tl.arange(0, 4)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    r = tl.arange(0, 16)[None, :, None]
    x = -tl.sum(tl.where(own, tl.reshape(A, [4, 16, 4, 16]), 0.0), 2)  # [block, row, column]
    for i in range(2, 16):
        row = tl.sum(tl.where(r == i, x, 0.0), 1)
        row += tl.sum(row[:, :, None] * x, 1)
        x = tl.where(r == i, row[:, None, :], x)
    x += tl.where(r == tl.arange(0, 16)[None, None, :], 1.0, 0.0)
    wide = tl.where(own, tl.broadcast_to(x[:, :, None, :], [4, 16, 4, 16]), 0.0)
    B = tl.reshape(wide, [64, 64])
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    between = tl.where((i // 16 != j // 16) & (i // 32 == j // 32), A, 0.0)
    B -= tl.dot(tl.dot(B, between, input_precision=PRECISION), B, input_precision=PRECISION)
    between = tl.where(i // 32 != j // 32, A, 0.0)
    B -= tl.dot(tl.dot(B, between, input_precision=PRECISION), B, input_precision=PRECISION)
    return B


@triton.jit(do_not_specialize=["S", "T"])
def within_chunks(
    k,
    v,
    g,
    beta,
    starts,
    lengths,
    slots,
    of_keys,
    deltas,
    logs,
    eps,
    k_t,
    k_head,
    v_t,
    v_head,
    g_t,
    beta_t,
    HV,
    S,
    T,
    SEQUENCES: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Writes W [T, HV, DK] and, as deltas, U [T, HV, DV] of a chunk; and to ``logs`` [2, HV, T]
    its G and the inverse norms of its keys."""
    kind: tl.constexpr = k.dtype.element_ty if HALF else tl.float32
    s, chunk = block_of(tl.program_id(0), lengths, slots, S, 64, SEQUENCES)
    if s >= S:
        return
    head, t0 = tl.program_id(1), chunk * 64
    length = tl.load(lengths + s)
    if (tl.load(slots + s) < 0) | (t0 >= length):
        return
    i, d = tl.arange(0, 64), tl.arange(0, K_BLOCK)
    t = tl.load(starts + s).to(tl.int64) + t0 + i
    here = t0 + i < length
    mask = here[:, None] & (d < DK)[None, :]
    k_at = k + t[:, None] * k_t + head // GROUP % HK * k_head + d[None, :]
    keys = tl.load(k_at, mask=mask, other=0.0)
    norm = _inverse_norms(keys, eps)
    log = tl.cumsum(tl.load(g + t * g_t + head, mask=here, other=0.0).to(tl.float32), 0)
    tl.store(logs + head * T + t, log, mask=here)
    tl.store(logs + (HV + head) * T + t, norm, mask=here)
    factor = tl.load(beta + t * beta_t + head, mask=here, other=0.0).to(tl.float32)
    lower = i[:, None] > i[None, :]
    decay = tl.exp(tl.where(lower, log[:, None] - log[None, :], 0.0)) * norm[None, :]
    products = _product(keys, tl.trans(keys), kind) * decay * (factor * norm)[:, None]
    inverse = _inverse(tl.where(lower, products, 0.0), "tf32" if HALF else "ieee") * factor[None, :]
    e = tl.arange(0, V_BLOCK)
    v_mask = here[:, None] & (e < DV)[None, :]
    v_at = v + t[:, None] * v_t + head * v_head + e[None, :]
    u = _product(inverse, tl.load(v_at, mask=v_mask, other=0.0), kind)
    tl.store(deltas + (t[:, None] * HV + head) * DV + e[None, :], u, mask=v_mask)
    w = _product(inverse * (norm * tl.exp(log))[None, :], keys, kind)
    tl.store(of_keys + (t[:, None] * HV + head) * DK + d[None, :], w, mask=mask)


@triton.jit(do_not_specialize=["S", "T"])
def scan_chunks(
    k,
    of_keys,
    deltas,
    logs,
    state,
    states,
    starts,
    lengths,
    slots,
    past,
    k_t,
    k_head,
    HV,
    S,
    T,
    SEQUENCES: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """A program goes through a sequence with some columns of one head's state: U becomes the
    deltas, and the state in front of each chunk is written to ``states`` [chunks, HV, DK, DV]."""
    kind: tl.constexpr = k.dtype.element_ty if HALF else tl.float32
    s, head = tl.program_id(2), tl.program_id(1)
    length, slot = tl.load(lengths + s), tl.load(slots + s)
    if (slot < 0) | (length <= 0):
        return
    start, goes_on = tl.load(starts + s).to(tl.int64), tl.load(past + s) > 0
    i, d = tl.arange(0, 64), tl.arange(0, K_BLOCK)
    e = tl.program_id(0) * V_BLOCK + tl.arange(0, V_BLOCK)
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    cell = d[:, None] * DV + e[None, :]
    own = state + (slot.to(tl.int64) * HV + head) * (DK * DV) + cell
    h = tl.load(own, mask=inside & goes_on, other=0.0)
    block = first_block(s, lengths, slots, S, 64, SEQUENCES).to(tl.int64)
    before = states + (block * HV + head) * (DK * DV) + cell
    k_rows = k + head // GROUP % HK * k_head
    for t0 in range(0, length, 64):
        t, here = start + t0 + i, t0 + i < length
        mask = here[:, None] & (d < DK)[None, :]
        tl.store(before, h, mask=inside)
        before += HV * (DK * DV)
        w = tl.load(of_keys + (t[:, None] * HV + head) * DK + d[None, :], mask=mask, other=0.0)
        u_at = deltas + (t[:, None] * HV + head) * DV + e[None, :]
        u_mask = here[:, None] & (e < DV)[None, :]
        u = tl.load(u_at, mask=u_mask, other=0.0).to(tl.float32)
        keys = tl.load(k_rows + t[:, None] * k_t + d[None, :], mask=mask, other=0.0)
        log = tl.load(logs + head * T + t, mask=here, other=0.0)
        last = tl.load(logs + head * T + start + tl.minimum(t0 + 64, length) - 1)
        norm = tl.load(logs + (HV + head) * T + t, mask=here, other=0.0)
        delta = u - _product(w, h, kind)
        tl.store(u_at, delta, mask=u_mask)
        delta *= (norm * tl.exp(last - log))[:, None]
        h = h * tl.exp(last) + _product(tl.trans(keys), delta, kind)
    tl.store(own, h, mask=inside)


@triton.jit(do_not_specialize=["S", "T"])
def outputs_of_chunks(
    q,
    k,
    deltas,
    logs,
    states,
    starts,
    lengths,
    slots,
    out,
    scale,
    eps,
    q_t,
    q_head,
    k_t,
    k_head,
    HV,
    S,
    T,
    SEQUENCES: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Writes some columns of a chunk's outputs: e^G Q S + (e^(G_i - G_j) q_i k_j, j <= i) delta."""
    kind: tl.constexpr = k.dtype.element_ty if HALF else tl.float32
    block = tl.program_id(0)
    s, chunk = block_of(block, lengths, slots, S, 64, SEQUENCES)
    if s >= S:
        return
    head, t0 = tl.program_id(1), chunk * 64
    length = tl.load(lengths + s)
    if (tl.load(slots + s) < 0) | (t0 >= length):
        return
    i, d = tl.arange(0, 64), tl.arange(0, K_BLOCK)
    e = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    t = tl.load(starts + s).to(tl.int64) + t0 + i
    here = t0 + i < length
    mask = here[:, None] & (d < DK)[None, :]
    k_at = k + t[:, None] * k_t + head // GROUP % HK * k_head + d[None, :]
    keys = tl.load(k_at, mask=mask, other=0.0)
    q_at = q + t[:, None] * q_t + head // GROUP % HK * q_head + d[None, :]
    queries = tl.load(q_at, mask=mask, other=0.0)
    cell = d[:, None] * DV + e[None, :]
    at = states + (block.to(tl.int64) * HV + head) * (DK * DV) + cell
    h = tl.load(at, mask=(d < DK)[:, None] & (e < DV)[None, :], other=0.0)
    row = (t[:, None] * HV + head) * DV + e[None, :]
    v_mask = here[:, None] & (e < DV)[None, :]
    delta = tl.load(deltas + row, mask=v_mask, other=0.0)
    log = tl.load(logs + head * T + t, mask=here, other=0.0)
    norm = tl.load(logs + (HV + head) * T + t, mask=here, other=0.0)
    lower = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(lower, log[:, None] - log[None, :], 0.0))
    scores = _product(queries, tl.trans(keys), kind) * decay * norm[None, :]
    result = _product(queries, h, kind) * tl.exp(log)[:, None]
    result += _product(tl.where(lower, scores, 0.0), delta, kind)
    tl.store(out + row, result * (_inverse_norms(queries, eps) * scale)[:, None], mask=v_mask)
