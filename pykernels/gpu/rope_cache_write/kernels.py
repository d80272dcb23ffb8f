"""The kernels: norms, rotary embedding, the cache's new rows.

An element and the other one of its pair are loaded both, the second one from L1: no element has to
move between threads, whichever way pairs lie.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..common.bf16 import to_bf16
from ..common.dequant import float_to_e4m3


@triton.jit
def _pairs(d, half, INTERLEAVED: tl.constexpr):
    """For each element: its pair's other one, the pair, and whether it is the pair's second."""
    if INTERLEAVED:
        other = d ^ 1
        pair = d // 2
        second = d % 2 == 1
    else:
        second = d >= half
        pair = tl.where(second, d - half, d)
        other = tl.where(second, d - half, d + half)
    return other, pair, second


@triton.jit
def _rotate(x, partner, angles, t, d, half, pair, second):
    """x with its first ``2 half`` elements turned; ``partner``: the others of their pairs."""
    turns = d < 2 * half
    at = angles + t * 2 * half + pair
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + half, mask=turns, other=0.0)
    return x * cos + tl.where(second, partner, -partner) * sin


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        x = to_bf16(x)
    else:
        x = x.to(DTYPE)
    return x


@triton.jit
def _store(x, cache, scale, mask, row_mask, QUANTIZE: tl.constexpr):
    """Rows x [G, D] to addresses ``cache``, E4M3 with a scale a row, or as they are."""
    if QUANTIZE:
        amax = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        by = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
        by = tl.where(by > 0, by, 1.0)
        codes = float_to_e4m3(tl.div_rn(x, by[:, None] + tl.zeros_like(x)))
        tl.store(cache, codes, mask=mask)
        tl.store(scale, by, mask=row_mask)
    else:
        tl.store(cache, _as(x, cache.dtype.element_ty), mask=mask)


@triton.jit
def _row_factor(row, count, eps, BLOCK: tl.constexpr):
    """``1 / sqrt(mean(x^2) + eps)`` of ``count`` numbers at ``row``."""
    i = tl.arange(0, BLOCK)
    x = tl.load(row + i, mask=i < count, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / count + eps)


@triton.jit
def gqa_write(
    qkv,
    angles,
    slot_mapping,
    k,
    v,
    k_scale,
    v_scale,
    q_norm,
    k_norm,
    out,
    stride,
    q_start,
    k_start,
    v_start,
    half,
    NH,
    KVH,
    D,
    NUM_CACHE_SLOTS,
    eps,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """Norms: 0 for none, 1 of a head, 2 of all heads together; those of values have no weight."""
    if TRIGGER:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    row = qkv + t * stride
    real = (head < NH + 2 * KVH) & (d < D)
    is_q = head < NH
    is_k = (head >= NH) & (head < NH + KVH)
    k_head, v_head = head - NH, head - NH - KVH
    is_v = (v_head >= 0) & (v_head < KVH)
    column = tl.where(is_k, k_start + k_head * D, v_start + v_head * D)
    column = tl.where(is_q, q_start + head * D, column)
    x = tl.load(row + column + d, mask=real, other=0.0).to(tl.float32)
    other, pair, second = _pairs(d, half, INTERLEAVED)
    turns = real & (d < 2 * half) & (is_q | is_k)
    partner = tl.load(row + column + other, mask=turns, other=0.0).to(tl.float32)
    if Q_NORM + K_NORM > 0 or V_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]  # of a head
        if V_NORM:
            x = tl.where(is_v, x * factor, x)
        if Q_NORM > 0:
            q_at = tl.where(is_q, head, 0) * D if Q_NORM == 2 else head * 0
            weight = tl.load(q_norm + q_at + d, mask=real & is_q, other=0.0).to(tl.float32)
            also = tl.load(q_norm + q_at + other, mask=turns & is_q, other=0.0).to(tl.float32)
            by = _row_factor(row + q_start, NH * D, eps, Q_ROW) if Q_NORM == 2 else factor
            x = tl.where(is_q, x * by * weight, x)
            partner = tl.where(is_q, partner * by * also, partner)
        if K_NORM > 0:
            w_at = tl.where(is_k, k_head, 0) * D if K_NORM == 2 else head * 0
            weight = tl.load(k_norm + w_at + d, mask=real & is_k, other=0.0).to(tl.float32)
            also = tl.load(k_norm + w_at + other, mask=turns & is_k, other=0.0).to(tl.float32)
            by = _row_factor(row + k_start, KVH * D, eps, K_ROW) if K_NORM == 2 else factor
            x = tl.where(is_k, x * by * weight, x)
            partner = tl.where(is_k, partner * by * also, partner)
    turned = _rotate(x, partner, angles, t, d, half, pair, second)
    x = tl.where(is_q | is_k, turned, x)
    tl.store(out + (t * NH + head) * D + d, _as(x, out.dtype.element_ty), mask=real & is_q)
    slot = tl.load(slot_mapping + t).to(tl.int64)
    if (slot >= 0) & (slot < NUM_CACHE_SLOTS):
        k_at, v_at = slot * KVH + k_head, slot * KVH + v_head
        k_scales = k_scale + tl.reshape(k_at, [HEADS]) if QUANTIZE else None
        v_scales = v_scale + tl.reshape(v_at, [HEADS]) if QUANTIZE else None
        _store(x, k + k_at * D + d, k_scales, real & is_k, tl.reshape(is_k, [HEADS]), QUANTIZE)
        _store(x, v + v_at * D + d, v_scales, real & is_v, tl.reshape(is_v, [HEADS]), QUANTIZE)


@triton.jit
def mla_write(
    q,
    kv,
    angles,
    slot_mapping,
    latent,
    rope,
    latent_scale,
    kv_norm,
    out,
    q_t,
    q_h,
    kv_t,
    out_t,
    out_h,
    latent_stride,
    rope_stride,
    half,
    NH,
    L,
    NUM_CACHE_SLOTS,
    eps,
    QUANTIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """The first program of a token writes the cache, the others turn queries."""
    if TRIGGER:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    other, pair, second = _pairs(d, half, INTERLEAVED)
    turns = d < 2 * half
    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping + t).to(tl.int64)
        if (slot >= 0) & (slot < NUM_CACHE_SLOTS):
            row = kv + t * kv_t
            i = tl.arange(0, L_BLOCK)[None, :]
            x = tl.load(row + i, mask=i < L, other=0.0).to(tl.float32)
            weight = tl.load(kv_norm + i, mask=i < L, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 1) / L + eps)[:, None] * weight
            one = tl.zeros([1], tl.int32)
            scales = latent_scale + slot + one if QUANTIZE else None
            _store(x, latent + slot * latent_stride + i, scales, i < L, one == 0, QUANTIZE)
            x = tl.load(row + L + d, mask=turns, other=0.0).to(tl.float32)
            partner = tl.load(row + L + other, mask=turns, other=0.0).to(tl.float32)
            x = _rotate(x, partner, angles, t, d, half, pair, second)
            tl.store(rope + slot * rope_stride + d, _as(x, rope.dtype.element_ty), mask=turns)
    else:
        head = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        mask = (head < NH) & turns
        row = q + t * q_t + head.to(tl.int64) * q_h
        x = tl.load(row + d, mask=mask, other=0.0).to(tl.float32)
        partner = tl.load(row + other, mask=mask, other=0.0).to(tl.float32)
        x = _rotate(x, partner, angles, t, d, half, pair, second)
        at = out + t * out_t + head.to(tl.int64) * out_h + d
        tl.store(at, _as(x, out.dtype.element_ty), mask=mask)
