"""Absorbed multi-head latent attention of the newest tokens over a paged latent cache.

One program reads a part of one sequence's latents once, for a block of query rows (heads of every
new token): the latent is key and value, so a block of it is loaded once for both products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...errors import PykernelsError
from ..common.launch import arch, check_device, interpreted, why_not
from ..common.strides import as_bytes, check_out
from ..plans.attention import DecodePlan, sms, warp_specialized_takes
from ..plans.attention_shape import AttentionShape
from .checks import check_cache, check_scales, check_scores, newest_tokens
from .mla_split_kv import TileParts
from .online_softmax import (
    cache_kind,
    halves,
    log_total,
    page_rows,
    pages_at,
    product,
    rows_in_half,
    scaled_step,
    score_factors,
    share_of_slot,
    softmax_step,
)
from .select import select_decode
from .split_kv import Partials

MOST_LATENT, MOST_ROTATED = 512, 64
"""Inputs of a head that every GPU has the shared memory for: those of DeepSeek."""


@triton.jit
def _shares(
    q, q_factor, q_rope, k, k_rope, k_scale, seen, m, total, inner, outer, unknown,
    KIND: tl.constexpr, SOFTCAP: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of one block and the running softmax: (shares, factor of the past, m, total).

    In the shares of an E4M3 cache the latents' scales are contained.
    """
    ROWS: tl.constexpr = q.shape[0]
    KEYS: tl.constexpr = k.shape[0]
    s_rope = tl.zeros([ROWS, KEYS], tl.float32)
    if ACROSS:
        if unknown >= 0:  # see the kernel
            s_rope = product(q_rope, tl.trans(k_rope), s_rope, WIDE)
    else:
        s_rope = product(q_rope, tl.trans(k_rope), s_rope, WIDE)
    if KIND == 0:
        s = product(q, tl.trans(k), s_rope, WIDE)
        return softmax_step(s, seen, m, total, inner, outer, True, SOFTCAP)
    else:  # the scale is the latent's alone
        s = product(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32), WIDE)
        s = s * (q_factor[:, None] * k_scale[None, :]) + s_rope
        return scaled_step(s, seen, k_scale, m, total, inner, outer, SOFTCAP)


@triton.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def _mla_decode(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, scale_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, B, S, NH, slots, table_stride,
    q_b, q_s, q_h, qr_b, qr_s, qr_h,
    PAGE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, ACROSS: tl.constexpr, EARLY: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    slot = tl.program_id(1)
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(length_ptr, slot, B, slots, S, 0, KEYS, BATCH, False)
        if parts == 0:
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
        q, q_factor = rows_in_half(q)

    last = length - S + s_at  # newest key that the row sees
    each = tl.cdiv(tl.cdiv(length, KEYS), parts) * KEYS
    begin = part * each
    end = tl.minimum(length, begin + each)
    table = table_ptr + b.to(tl.int64) * table_stride

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, L], tl.float32)
    pages = pages_at(table, begin, end, n, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        # Behind the end the last key again, whose share is zero: no masks, and no NaN.
        at = page_rows(pages, start, tl.minimum(n, end - 1 - start), PAGE, KEYS)
        pages = pages_at(table, start + KEYS, end, n, PAGE, KEYS)
        there = start + n < end
        k = tl.load(latent_ptr + at[:, None] * L + c[None, :])
        k_rope = tl.load(rope_ptr + at[:, None] * R + r[None, :])
        k = halves(k, KIND, not WIDE)
        k_scale = tl.zeros([KEYS], tl.float32)
        if KIND != 0:
            k_scale = tl.load(scale_ptr + at)
        seen = there[None, :] & (start + n[None, :] <= last[:, None])
        if ACROSS:
            # Triton gives the warps of a product whose result enters another product to its rows,
            # and 64 rows are one warpgroup's: two would compute the same. It does not see the other
            # product from inside an `if`, and shares the columns. Both conditions always hold.
            p = tl.where(there[None, :], 0.0, 1.0).broadcast_to(ROWS, KEYS)
            p = p.to(k.dtype)
            alpha = tl.full([ROWS], 1.0, tl.float32)
            if start < end:
                p32, alpha, m, total = _shares(
                    q, q_factor, q_rope, k, k_rope, k_scale, seen, m, total, inner, outer,
                    start - begin, KIND, SOFTCAP, ACROSS, WIDE,
                )  # fmt: skip
                p = p32.to(k.dtype)
        else:
            p32, alpha, m, total = _shares(
                q, q_factor, q_rope, k, k_rope, k_scale, seen, m, total, inner, outer, 0,
                KIND, SOFTCAP, ACROSS, WIDE,
            )  # fmt: skip
            p = p32.to(k.dtype)
        acc = product(p, k, acc * alpha[:, None], WIDE)

    y = acc / tl.where(total == 0, 1.0, total)[:, None]
    o_at = slot.to(tl.int64) * (S * NH) + row  # not split: slots are sequences
    o_ptrs = out_ptr + o_at[:, None] * L + c[None, :]
    if SPLIT:
        tl.store(lse_ptr + o_at, log_total(m, total), mask=inside)
        if begin < end:
            tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _check(
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
) -> torch.device:
    """The one device of what ``mla_decode`` takes; raises `PykernelsError` for what it does not."""
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
    return device


def supports(*tensors: torch.Tensor, **options: Any) -> str | None:
    """None if ``mla_decode`` takes these (all but max_length, out, plan), or the reason why not."""
    return why_not(_check, *tensors, **options)


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
            many programs share a sequence: lengths are read on the device.
        out: bf16 like the result, contiguous.
        plan: instead of a tuned or the shipped one.

    Returns:
        bf16 [B, (S,) NH, L].

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    device = _check(
        q_latent, q_rope, latent, rope, page_table, lengths, scale=scale,
        latent_scale=latent_scale, softcap=softcap,
    )  # fmt: skip
    q, q_r = newest_tokens(q_latent, "q_latent"), newest_tokens(q_rope, "q_rope")
    (B, S, NH, L), R, page = q.shape, q_r.shape[-1], latent.shape[1]
    result = check_out(out, q_latent, *q_latent.shape[:-1], L, dtype=torch.bfloat16)
    if result.numel() == 0:
        return result
    fp8, aligned = latent_scale is not None, not (latent.data_ptr() | rope.data_ptr()) % 16
    lies = (fp8, page, device, aligned)
    longest = page_table.shape[1] * page if max_length is None else max_length
    shape = AttentionShape(NH, 1, L, R, L, page, 0, B, S, longest)
    chosen = plan or select_decode("mla_decode", shape, fp8, device, aligned)
    if chosen.warp_specialized and not warp_specialized_takes(L, R, *lies):
        raise PykernelsError(
            f"the kernel by hand takes no {latent.dtype} latents of {L} + {R} in pages of {page}, "
            f"at {latent.data_ptr() % 16} and {rope.data_ptr() % 16} behind 16 bytes, on this GPU",
            "Give a plan without warp_specialized",
        )
    blocks = triton.cdiv(S * NH, chosen.rows)
    slots = chosen.slots(B, blocks, longest, sms(device))
    kind = TileParts if chosen.warp_specialized else Partials
    partials = kind(result.view(B, S * NH, L), slots)
    inner, outer = score_factors(scale, softcap)
    sizes = (
        inner,
        outer,
        B,
        S,
        NH,
        slots,
        page_table.stride(0),
        *q.stride()[:3],
        *q_r.stride()[:3],
    )
    where = (page_table, lengths, partials.values, partials.lse)
    options = {"PAGE": page, "L": L, "R": R, "SOFTCAP": softcap is not None}
    options |= {"SPLIT": partials.split, "BATCH": partials.batch}
    grid = (blocks, slots)
    if chosen.warp_specialized:
        from .hopper import mla_decode as hopper  # Gluon: not in the interpreter

        hopper.mla_decode_hopper[grid](
            q, q_r, as_bytes(latent) if fp8 else hopper.rows_of(latent, hopper.PIECE.value),
            hopper.rows_of(rope, R), latent_scale, *where, *sizes,
            **options, MANY=S > 1, E4M3=fp8, num_warps=hopper.WARPS, maxnreg=hopper.REGISTERS,
            **partials.launch,
        )  # fmt: skip
    else:
        _mla_decode[grid](
            q, q_r, as_bytes(latent), rope, latent_scale, *where, *sizes, **options,
            ROWS=chosen.rows, KEYS=chosen.keys, STAGES=chosen.stages,
            KIND=cache_kind(latent, arch(device)), ACROSS=chosen.across, EARLY=partials.early,
            WIDE=interpreted(),
            num_warps=chosen.warps, num_stages=chosen.stages, **partials.launch,
        )  # fmt: skip
    partials.combine(lengths, S, None, chosen.keys)
    return result
