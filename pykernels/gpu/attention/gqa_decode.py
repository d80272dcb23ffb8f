"""Grouped-query attention of the newest tokens over a paged cache.

One program reads a part of one sequence's keys and values of one KV head, for all query heads of
that KV head and every new token: each byte of the cache is read once.
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
from ..plans.attention import DecodePlan, in_lanes_takes, in_ring_takes, sms
from ..plans.attention_shape import AttentionShape
from .checks import check_cache, check_scales, check_scores, newest_tokens
from .online_softmax import (
    cache_kind,
    first_seen,
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


@triton.jit
def _heads(rows, d, D: tl.constexpr):
    """Rows of D elements, zeros behind them."""
    if D == d.shape[0]:
        return tl.load(rows + d[None, :])
    else:
        return tl.load(rows + d[None, :], mask=(d < D)[None, :], other=0)


@triton.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def _gqa_decode(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, window, B, S, KVH, slots, table_stride, q_b, q_s, q_h,
    G: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, BATCH: tl.constexpr,
    KIND: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    blocks = tl.cdiv(S * G, ROWS)
    kv, slot = tl.program_id(0) // blocks, tl.program_id(1)
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(
            length_ptr, slot, B, slots, S, window, KEYS, BATCH, WINDOW
        )
        if parts == 0:
            return
    else:
        length = tl.load(length_ptr + b)
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)  # s * G + g
    n, d = tl.arange(0, KEYS), tl.arange(0, D_BLOCK)
    inside = row < S * G
    s_at, h_at = row // G, kv * G + row % G
    wide = d < D  # all true for powers of two
    q_at = b.to(tl.int64) * q_b + s_at.to(tl.int64) * q_s + h_at * q_h
    q_mask = inside[:, None] & wide[None, :]
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=q_mask, other=0.0)

    q_factor = tl.full([ROWS], 1.0, tl.float32)
    if KIND != 0:
        q, q_factor = rows_in_half(q)

    last = length - S + s_at  # newest key that the row sees
    first = first_seen(length, S, window, KEYS, WINDOW)
    each = tl.cdiv(tl.cdiv(length - first, KEYS), parts) * KEYS
    begin = first + part * each
    end = tl.minimum(length, begin + each)
    table = table_ptr + b.to(tl.int64) * table_stride

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_BLOCK], tl.float32)
    pages = pages_at(table, begin, end, n, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        # Behind the end the last key again, whose share is zero: no masks, and no NaN.
        at = page_rows(pages, start, tl.minimum(n, end - 1 - start), PAGE, KEYS) * KVH + kv
        pages = pages_at(table, start + KEYS, end, n, PAGE, KEYS)
        there = start + n < end
        k = halves(_heads(k_ptr + at[:, None] * D, d, D), KIND, False)
        v = halves(_heads(v_ptr + at[:, None] * D, d, D), KIND, False)
        s = product(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32), WIDE)
        seen = there[None, :] & (start + n[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (start + n[None, :] > last[:, None] - window)
        if KIND != 0:
            k_scale = tl.load(k_scale_ptr + at)
            v_scale = tl.load(v_scale_ptr + at)
            s *= q_factor[:, None] * k_scale[None, :]
            p, alpha, m, total = scaled_step(s, seen, v_scale, m, total, inner, outer, SOFTCAP)
        else:
            p, alpha, m, total = softmax_step(s, seen, m, total, inner, outer, True, SOFTCAP)
        acc = product(p.to(v.dtype), v, acc * alpha[:, None], WIDE)

    y = acc / tl.where(total == 0, 1.0, total)[:, None]
    o_at = (slot.to(tl.int64) * S + s_at) * (KVH * G) + h_at  # not split: slots are sequences
    o_ptrs = out_ptr + o_at[:, None] * D + d[None, :]
    if SPLIT:
        tl.store(lse_ptr + o_at, log_total(m, total), mask=inside)
        if begin < end:
            tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.device:
    """The one device of what ``gqa_decode`` takes; raises `PykernelsError` for what it does not."""
    device = check_device(q, k, v, page_table, lengths)
    B, _, NH, D = newest_tokens(q, "q").shape
    KVH = k.shape[2] if k.ndim == 4 else 0
    if KVH < 1 or NH % KVH:
        raise PykernelsError(f"{NH} query heads on {KVH} KV heads", "Give a whole number a KV head")
    if not 16 <= D <= 256:
        raise PykernelsError(f"heads of {D}", "The kernel takes 16 to 256")
    check_scores(scale, window, softcap)
    P, page = check_cache(k, "k", (KVH, D), page_table, lengths, B)
    check_cache(v, "v", (KVH, D), page_table, lengths, B, beside=k)
    check_scales(k, k_scale, "k_scale", (P, page, KVH))
    check_scales(v, v_scale, "v_scale", (P, page, KVH))
    if v.dtype != k.dtype:
        raise PykernelsError(f"k is {k.dtype} and v {v.dtype}", "Both must be of one dtype")
    return device


def supports(*tensors: torch.Tensor, **options: Any) -> str | None:
    """None if ``gqa_decode`` takes these (all but max_length, out, plan), or the reason why not."""
    return why_not(_check, *tensors, **options)


def gqa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    max_length: int | None = None,
    out: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """``pykernels.ref.gqa_decode``: the same shapes, on the GPU.

    Args:
        q: bf16, any strides but the last, which is 1; D up to 256.
        k, v: bf16, or E4M3 with scales of one a token and head; contiguous.
        max_length: no sequence is longer (default: what the page table can hold). It only sets how
            many programs share a sequence: lengths are read on the device.
        out: bf16 like the result, contiguous.
        plan: instead of a tuned or the shipped one.

    Returns:
        bf16 [B, (S,) NH, D].

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    device = _check(
        q, k, v, page_table, lengths, scale=scale, k_scale=k_scale, v_scale=v_scale, window=window,
        softcap=softcap,
    )  # fmt: skip
    window = None if window is None else int(window)  # NumPy's integers are none to Triton
    q4 = newest_tokens(q, "q")
    (B, S, NH, D), (page, KVH) = q4.shape, k.shape[1:3]
    result = check_out(out, q, *q.shape, dtype=torch.bfloat16)
    if result.numel() == 0:
        return result
    G = NH // KVH
    fp8, aligned = k_scale is not None, not (k.data_ptr() | v.data_ptr()) % 16
    lies = (fp8, page, device, aligned)
    longest = page_table.shape[1] * page if max_length is None else max_length
    seen = longest if window is None else min(longest, window + S - 1)
    shape = AttentionShape(NH, KVH, D, 0, D, page, window or 0, B, S, seen)
    chosen = plan or select_decode("gqa_decode", shape, fp8, device, aligned)
    if chosen.in_lanes and not in_lanes_takes(D, *lies):
        raise PykernelsError(
            f"a plan in lanes for {k.dtype} heads of {D} in pages of {page}, at "
            f"{k.data_ptr() % 16} and {v.data_ptr() % 16} behind 16 bytes, on this GPU",
            "Give a plan without in_lanes",
        )
    if chosen.in_ring and not in_ring_takes(D, *lies):
        raise PykernelsError(
            f"a plan with a ring for {k.dtype} heads of {D} in pages of {page}, at "
            f"{k.data_ptr() % 16} and {v.data_ptr() % 16} behind 16 bytes, on this GPU",
            "Give a plan without in_ring",
        )
    blocks = triton.cdiv(S * G, chosen.rows)
    if window is not None:
        longest = min(longest, window + S - 1 + chosen.keys)
    slots = chosen.slots(B, KVH * blocks, longest, sms(device))
    partials = Partials(result.view(B, S * NH, D), slots)
    inner, outer = score_factors(scale, softcap)
    grid = (KVH * blocks, slots)
    where = (page_table, lengths, partials.values, partials.lse)
    numbers = (inner, outer, window or 0, B, S)
    strides = (slots, page_table.stride(0), *q4.stride()[:3])
    options = {"G": G, "PAGE": page, "WINDOW": window is not None, "SOFTCAP": softcap is not None}
    options |= {"BATCH": partials.batch, "SPLIT": partials.split, "EARLY": partials.early}
    if chosen.in_ring:
        # Gluon: not in the interpreter
        from .hopper import gqa_decode as ring
        from .hopper import split_kv as last_part

        tile_rows, most = min(16, S * G), slots - B + 1
        last = partials.split and last_part.worth_it(tile_rows, most)
        words, number = last_part.counted(device, B * KVH * blocks) if last else (None, 0)
        ring.gqa_decode_ring[grid](
            q4, ring.rows_of(k), ring.rows_of(v), *where, *numbers, *strides, page_table.shape[1],
            number, words, result, **options, KVH=KVH, STAGES=chosen.stages, MANY=S > 1, LAST=last,
            num_warps=ring.WARPS, **partials.launch,
        )  # fmt: skip
        if last:
            return result
    elif chosen.in_lanes:
        from . import gqa_decode_fp8 as lanes  # Gluon: not in the interpreter
        from .gqa_decode_fp8_mma import layouts

        keys = chosen.keys // chosen.warps
        in_key, in_value = layouts(chosen.warps, keys)
        lanes.gqa_decode_lanes[grid](
            q4, k.view(torch.int32), v.view(torch.int32), k_scale, v_scale, *where, *numbers,
            *strides, **options, KVH=KVH, KEYS=keys, W=chosen.warps, ROWS=chosen.rows, MANY=S > 1,
            LK=in_key, LV=in_value, num_warps=chosen.warps, **partials.launch,
        )  # fmt: skip
    else:
        _gqa_decode[grid](
            q4, as_bytes(k), as_bytes(v), k_scale, v_scale, *where, *numbers, KVH,
            *strides, **options, D=D, D_BLOCK=triton.next_power_of_2(D), ROWS=chosen.rows,
            KEYS=chosen.keys, STAGES=chosen.stages, KIND=cache_kind(k, arch(device)),
            WIDE=interpreted(), num_warps=chosen.warps, num_stages=chosen.stages, **partials.launch,
        )  # fmt: skip
    partials.combine(lengths, S, window, chosen.keys)
    return result
