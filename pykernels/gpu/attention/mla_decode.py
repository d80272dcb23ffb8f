"""Absorbed multi-head latent attention of the newest tokens over a paged latent cache.

FlashDecoding (split-KV): one CTA reads a split of one sequence's latents once, for a block of query
rows (heads of every new token). The latent is key and value, so a block of it is loaded once for
both products. Here are the op and Triton's kernel; Hopper's for DeepSeek's sizes, in the manner of
FlashMLA, is ``hopper.mla_decode``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...errors import PykernelsError
from ..common.launch import arch, check_device, interpreted, num_sms, why_not
from ..common.strides import as_bytes, check_out
from ..plans.attention import DecodePlan
from ..plans.attention_shape import AttentionShape
from .checks import check_cache, check_scales, check_scores, newest_tokens
from .mla_split_kv import TilePartials
from .online_softmax import (
    cache_kind,
    cache_to_half,
    find_split,
    half_rows,
    load_lengths,
    log_sum_exp,
    page_rows,
    pages_at,
    product,
    score_factors,
    softmax_step,
    softmax_step_scaled,
    split_range,
)
from .select import select_decode
from .split_kv import Partials

MOST_LATENT, MOST_ROTATED = 512, 64
"""Inputs of a head that every GPU has the shared memory for: those of DeepSeek."""


@triton.jit
def _scores(
    q,
    q_factor,
    q_rope,
    k,
    k_rope,
    k_scale,
    mask,
    m_i,
    l_i,
    inner,
    outer,
    unknown,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT_SCORES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A block's scores and the online softmax: (p, factor of what was accumulated, m_i, l_i).

    The ``p`` of an E4M3 cache have the latents' scales in them.
    """
    ROWS: tl.constexpr = q.shape[0]
    KEYS: tl.constexpr = k.shape[0]
    s_rope = tl.zeros([ROWS, KEYS], tl.float32)
    if SPLIT_SCORES:
        if unknown >= 0:  # see the kernel
            s_rope = product(q_rope, tl.trans(k_rope), s_rope, WIDE)
    else:
        s_rope = product(q_rope, tl.trans(k_rope), s_rope, WIDE)
    if KIND == 0:
        s = product(q, tl.trans(k), s_rope, WIDE)
        return softmax_step(s, mask, m_i, l_i, inner, outer, True, SOFTCAP)
    else:  # the scale is the latent's alone
        s = product(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32), WIDE)
        s = s * (q_factor[:, None] * k_scale[None, :]) + s_rope
        return softmax_step_scaled(s, mask, k_scale, m_i, l_i, inner, outer, SOFTCAP)


@triton.jit(do_not_specialize=["B", "total_splits", "table_stride"])  # a batch compiles nothing new
def _mla_decode(
    q_ptr,
    q_rope_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    inner,
    outer,
    B,
    S,
    NH,
    total_splits,
    table_stride,
    q_b,
    q_s,
    q_h,
    qr_b,
    qr_s,
    qr_h,
    PAGE: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SPLIT_SCORES: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
):
    if EARLY:
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    split_idx = tl.program_id(1)
    b, split, num_splits = split_idx, 0, 1
    if SPLIT:
        i, lengths = load_lengths(length_ptr, B, BATCH)
        b, length, split, num_splits = find_split(
            i, lengths, split_idx, B, total_splits, S, 0, KEYS, False
        )
        if num_splits == 0:
            return
    else:
        length = tl.load(length_ptr + b)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token-major: s * NH + h
    n, c, r = tl.arange(0, KEYS), tl.arange(0, L), tl.arange(0, R)
    inside = row < S * NH
    s_at, h_at = row // NH, row % NH
    q_at = b.to(tl.int64) * q_b + s_at.to(tl.int64) * q_s + h_at * q_h
    q = tl.load(q_ptr + q_at[:, None] + c[None, :], mask=inside[:, None], other=0.0)
    q_at = b.to(tl.int64) * qr_b + s_at.to(tl.int64) * qr_s + h_at * qr_h
    q_rope = tl.load(q_rope_ptr + q_at[:, None] + r[None, :], mask=inside[:, None], other=0.0)

    q_factor = tl.full([ROWS], 1.0, tl.float32)
    if KIND != 0:
        q, q_factor = half_rows(q)

    last = length - S + s_at  # newest key that the row attends to
    begin, end = split_range(0, length, split, num_splits, KEYS, False)
    table = table_ptr + b.to(tl.int64) * table_stride

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, L], tl.float32)
    pages = pages_at(table, begin, end, n, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        # Behind the end the last key again, whose probability is zero: loads without masks, and no
        # NaN in the cache is read.
        at = page_rows(pages, start, tl.minimum(n, end - 1 - start), PAGE, KEYS)
        pages = pages_at(table, start + KEYS, end, n, PAGE, KEYS)
        valid = start + n < end
        k = tl.load(latent_ptr + at[:, None] * L + c[None, :])
        k_rope = tl.load(rope_ptr + at[:, None] * R + r[None, :])
        k = cache_to_half(k, KIND, not WIDE)
        k_scale = tl.zeros([KEYS], tl.float32)
        if KIND != 0:
            k_scale = tl.load(scale_ptr + at)
        mask = valid[None, :] & (start + n[None, :] <= last[:, None])
        if SPLIT_SCORES:
            # Triton gives the warps of a product whose result enters another product to its rows,
            # and 64 rows are one warpgroup's: two would compute the same. It does not see the other
            # product from inside an `if`, and divides the columns. Both conditions always hold.
            p = tl.where(valid[None, :], 0.0, 1.0).broadcast_to(ROWS, KEYS)
            p = p.to(k.dtype)
            alpha = tl.full([ROWS], 1.0, tl.float32)
            if start < end:
                p32, alpha, m_i, l_i = _scores(
                    q,
                    q_factor,
                    q_rope,
                    k,
                    k_rope,
                    k_scale,
                    mask,
                    m_i,
                    l_i,
                    inner,
                    outer,
                    start - begin,
                    KIND,
                    SOFTCAP,
                    SPLIT_SCORES,
                    WIDE,
                )
                p = p32.to(k.dtype)
        else:
            p32, alpha, m_i, l_i = _scores(
                q,
                q_factor,
                q_rope,
                k,
                k_rope,
                k_scale,
                mask,
                m_i,
                l_i,
                inner,
                outer,
                0,
                KIND,
                SOFTCAP,
                SPLIT_SCORES,
                WIDE,
            )
            p = p32.to(k.dtype)
        acc = product(p, k, acc * alpha[:, None], WIDE)

    y = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    o_at = split_idx.to(tl.int64) * (S * NH) + row  # not split: of a sequence
    o_ptrs = out_ptr + o_at[:, None] * L + c[None, :]
    if SPLIT:
        tl.store(lse_ptr + o_at, log_sum_exp(m_i, l_i), mask=inside)
        if begin < end:
            tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _checked(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    latent_scale: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.device, torch.Tensor, torch.Tensor]:
    """(the device, the two parts of q as [B, S, NH, *]); raises `PykernelsError` for what
    ``mla_decode`` refuses."""
    device = check_device(q_latent, q_rope, latent, rope, page_table, lengths)
    q, q_r = newest_tokens(q_latent, "q_latent"), newest_tokens(q_rope, "q_rope")
    B, L, R = q.shape[0], q.shape[-1], q_r.shape[-1]
    if q_r.shape[:3] != q.shape[:3]:
        raise PykernelsError(
            f"q_latent {list(q.shape)} and q_rope {list(q_r.shape)} do not match",
            "Give both the same batch, tokens and heads",
        )
    if any(size & (size - 1) or size < 16 for size in (L, R)):
        raise PykernelsError(f"latents of {L} + {R}", "Both must be powers of two, at least 16")
    if L > MOST_LATENT or R > MOST_ROTATED:
        raise PykernelsError(
            f"latents of {L} + {R}",
            f"There is shared memory for {MOST_LATENT} + {MOST_ROTATED} at most",
        )
    P, page = check_cache(latent, "latent", (L,), page_table, lengths, B)
    check_cache(rope, "rope", (R,), page_table, lengths, B, beside=latent, bf16_only=True)
    check_scores(scale, None, softcap)
    check_scales(latent, latent_scale, "latent_scale", (P, page))
    return device, q, q_r


def supports(*tensors: torch.Tensor, **options: Any) -> str | None:
    """None if ``mla_decode`` takes these (all but max_length, out, plan), or the reason why not."""
    return why_not(_checked, *tensors, **options)


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    latent_scale: torch.Tensor | None = None,
    softcap: float | None = None,
    max_length: int | None = None,
    out: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """``pykernels.ref.mla_decode``: the same shapes, on the GPU.

    Args:
        q_latent, q_rope: bf16, any strides but the last, which is 1.
        latent: bf16, or E4M3 with ``latent_scale``; rope: bf16; both contiguous.
        max_length: no sequence is longer (default: what the page table can hold). It only sets how
            many splits a sequence has: lengths are read on the device.
        out: bf16 like the result, contiguous.
        plan: instead of a tuned or the shipped one.

    Returns:
        bf16 [B, (S,) NH, L].

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    device, q, q_r = _checked(
        q_latent,
        q_rope,
        latent,
        rope,
        page_table,
        lengths,
        scale=scale,
        latent_scale=latent_scale,
        softcap=softcap,
    )
    (B, S, NH, L), R, page = q.shape, q_r.shape[-1], latent.shape[1]
    result = check_out(out, q_latent, *q_latent.shape[:-1], L, dtype=torch.bfloat16)
    if result.numel() == 0:
        return result
    longest = page_table.shape[1] * page if max_length is None else max_length
    shape = AttentionShape(NH, 1, L, R, L, page, 0, B, S, longest)
    fp8, aligned = latent_scale is not None, not (latent.data_ptr() | rope.data_ptr()) % 16
    chosen = select_decode("mla_decode", shape, fp8, aligned, device, plan)
    tiles = triton.cdiv(S * NH, chosen.rows)
    total_splits = chosen.total_splits(B, tiles, longest, num_sms(device))
    kind = TilePartials if chosen.warp_specialized else Partials
    partials = kind(result.view(B, S * NH, L), total_splits)
    where = (page_table, lengths, partials.values, partials.lse)
    numbers = (*score_factors(scale, softcap), B, S, NH)
    strides = (total_splits, page_table.stride(0), *q.stride()[:3], *q_r.stride()[:3])
    options = {"PAGE": page, "L": L, "R": R, "SOFTCAP": softcap is not None}
    options |= {"SPLIT": partials.split, "BATCH": partials.batch}
    grid = (tiles, total_splits)
    if chosen.warp_specialized:
        from .hopper import mla_decode as hopper  # Gluon: not in the interpreter

        hopper.mla_decode_hopper[grid](
            q,
            q_r,
            as_bytes(latent) if fp8 else hopper.rows_of(latent, hopper.PIECE.value),
            hopper.rows_of(rope, R),
            latent_scale,
            *where,
            *numbers,
            *strides,
            **options,
            MULTI_TOKEN=S > 1,
            E4M3=fp8,
            num_warps=hopper.WARPS,
            maxnreg=hopper.REGISTERS,
            **partials.launch,
        )
    else:
        _mla_decode[grid](
            q,
            q_r,
            as_bytes(latent),
            rope,
            latent_scale,
            *where,
            *numbers,
            *strides,
            **options,
            ROWS=chosen.rows,
            KEYS=chosen.keys,
            STAGES=chosen.num_stages,
            KIND=cache_kind(latent, arch(device)),
            SPLIT_SCORES=chosen.split_scores,
            EARLY=partials.early,
            WIDE=interpreted(),
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            **partials.launch,
        )
    partials.combine(lengths, S, None, chosen.keys)
    return result
