"""The gated delta rule token by token: a program has some columns of one head's state."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def recurrent(
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
):
    s, head = tl.program_id(2), tl.program_id(1)
    length, slot = tl.load(lengths + s), tl.load(slots + s)
    if (slot < 0) | (length <= 0):
        return
    start, goes_on = tl.load(starts + s).to(tl.int64), tl.load(past + s) > 0
    d = tl.arange(0, K_BLOCK)
    e = tl.program_id(0) * V_BLOCK + tl.arange(0, V_BLOCK)
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    own = state + (slot.to(tl.int64) * HV + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    h = tl.load(own, mask=inside & goes_on, other=0.0)
    q_row, k_row = q + head // GROUP % HK * q_head + d, k + head // GROUP % HK * k_head + d
    for t in range(start, start + length):
        key = tl.load(k_row + t * k_t, mask=d < DK, other=0.0).to(tl.float32)
        query = tl.load(q_row + t * q_t, mask=d < DK, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_t + head * v_head + e, mask=e < DV, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        h *= tl.exp(tl.load(g + t * g_t + head).to(tl.float32))
        delta = (value - tl.sum(h * key[:, None], 0)) * tl.load(beta + t * beta_t + head)
        h += key[:, None] * delta[None, :]
        result = tl.sum(h * query[:, None], 0)
        tl.store(out + (t * HV + head) * DV + e, result, mask=e < DV)
    tl.store(own, h, mask=inside)
