"""The gated delta rule in chunks of 64 tokens: what is within a chunk, and the scan over chunks.

With normed keys K, scaled queries Q, and G the sums of g in a chunk, its deltas are those of a
triangular system (the WY form of "Gated Delta Networks", arXiv 2412.06464, section 3.3):

    (I + A) delta = beta (V - e^G K S),  A_ij = beta_i e^(G_i - G_j) k_i k_j for j < i

`within_chunks` inverts I + A, for all chunks at once, which the scan then only multiplies with.
Norms are factors behind the products, so that keys and queries are never rounded. All sums are
float32; of inputs in 16 bits the other operand of a product is rounded to them, else both to tf32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import block_of


@triton.jit
def _product(a, b, HALF: tl.constexpr, WIDE: tl.constexpr):
    """``a @ b``: float32 exactly, bf16 with HALF; WIDE: in float32, for the interpreter, which
    multiplies bf16 as integers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif HALF:
        return tl.dot(a, b.to(a.dtype))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


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


@triton.jit(do_not_specialize=["S"])
def within_chunks(
    q,
    k,
    g,
    beta,
    starts,
    lengths,
    slots,
    inverses,
    scores,
    scale,
    eps,
    q_t,
    q_head,
    k_t,
    k_head,
    g_t,
    beta_t,
    HV,
    S,
    SEQUENCES: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Writes a chunk's (I + A)^-1 and its scores, e^(G_i - G_j) q_i k_j, both [T, HV, 64]."""
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
    k_norm = _inverse_norms(keys, eps)
    log = tl.cumsum(tl.load(g + t * g_t + head, mask=here, other=0.0).to(tl.float32), 0)
    lower = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(lower, log[:, None] - log[None, :], 0.0)) * k_norm[None, :]
    keys_too = tl.trans(keys)
    at = (t[:, None] * HV + head) * 64 + i[None, :]
    q_at = q + t[:, None] * q_t + head // GROUP % HK * q_head + d[None, :]
    queries = tl.load(q_at, mask=mask, other=0.0)
    q_norm = _inverse_norms(queries, eps) * scale
    products = _product(queries, keys_too, HALF, WIDE) * decay * q_norm[:, None]
    tl.store(scores + at, tl.where(lower, products, 0.0), mask=here[:, None])
    corrected = tl.load(beta + t * beta_t + head, mask=here, other=0.0) * k_norm
    products = _product(keys, keys_too, HALF, WIDE) * decay * corrected[:, None]
    A = tl.where(i[:, None] > i[None, :], products, 0.0)
    tl.store(inverses + at, _inverse(A, "tf32" if HALF else "ieee"), mask=here[:, None])


@triton.jit
def scan_chunks(
    q,
    k,
    v,
    g,
    beta,
    state,
    starts,
    lengths,
    slots,
    past,
    inverses,
    scores,
    out,
    scale,
    eps,
    q_t,
    q_head,
    k_t,
    k_head,
    v_t,
    v_head,
    g_t,
    beta_t,
    HV,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program goes through a sequence with some columns of one head's state."""
    s, head = tl.program_id(2), tl.program_id(1)
    length, slot = tl.load(lengths + s), tl.load(slots + s)
    if (slot < 0) | (length <= 0):
        return
    start, goes_on = tl.load(starts + s).to(tl.int64), tl.load(past + s) > 0
    i, d = tl.arange(0, 64), tl.arange(0, K_BLOCK)
    e = tl.program_id(0) * V_BLOCK + tl.arange(0, V_BLOCK)
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    own = state + (slot.to(tl.int64) * HV + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    h = tl.load(own, mask=inside & goes_on, other=0.0)
    q_rows, k_rows = q + head // GROUP % HK * q_head, k + head // GROUP % HK * k_head
    for t0 in range(0, length, 64):
        t, here = start + t0 + i, t0 + i < length
        mask = here[:, None] & (d < DK)[None, :]
        k_at = k_rows + t[:, None] * k_t + d[None, :]
        keys = tl.load(k_at, mask=mask, other=0.0)
        k_norm = _inverse_norms(keys, eps)
        q_at = q_rows + t[:, None] * q_t + d[None, :]
        queries = tl.load(q_at, mask=mask, other=0.0)
        q_norm = _inverse_norms(queries, eps) * scale
        v_at = v + t[:, None] * v_t + head * v_head + e[None, :]
        v_mask = here[:, None] & (e < DV)[None, :]
        values = tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        steps = tl.load(g + t * g_t + head, mask=here, other=0.0).to(tl.float32)
        log, last = tl.cumsum(steps, 0), tl.sum(steps, 0)
        of_keys = _product(keys, h, HALF, WIDE) * (k_norm * tl.exp(log))[:, None]
        corrected = tl.load(beta + t * beta_t + head, mask=here, other=0.0).to(tl.float32)
        wanted = corrected[:, None] * (values - of_keys)
        at = (t[:, None] * HV + head) * 64 + i[None, :]
        inverse = tl.load(inverses + at, mask=here[:, None], other=0.0)
        deltas = _product(inverse, wanted, HALF, WIDE)
        result = _product(queries, h, HALF, WIDE) * (q_norm * tl.exp(log))[:, None]
        score = tl.load(scores + at, mask=here[:, None], other=0.0)
        result += _product(score, deltas, HALF, WIDE)
        tl.store(out + (t[:, None] * HV + head) * DV + e[None, :], result, mask=v_mask)
        deltas *= (k_norm * tl.exp(last - log))[:, None]
        h = h * tl.exp(last) + _product(tl.trans(keys), deltas, HALF, WIDE)
    tl.store(own, h, mask=inside)
