"""Grouped-query attention of the newest tokens over a paged cache: FlashDecoding (split-KV).

One CTA reads a split of one sequence's keys and values of one KV head, for all query heads of that
KV head and every new token: each byte of the cache is read once. The splits' results are combined
by a second kernel (``split_kv``), or by the CTA that is done last (``hopper.split_kv``).

Here are the op and Triton's kernel. Two more take heads of 128: ``gqa_decode_fp8`` for E4M3, and
``hopper.gqa_decode`` for bf16.
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
from ..plans.attention import MAX_HEAD, DecodePlan
from ..plans.attention_shape import AttentionShape
from .checks import check_cache, check_scales, check_scores, check_sinks, newest_tokens
from .online_softmax import (
    cache_kind,
    cache_to_half,
    find_split,
    first_key,
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
    with_sink,
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


@triton.jit(do_not_specialize=["B", "total_splits", "table_stride"])  # a batch compiles nothing new
def _gqa_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    inner,
    outer,
    window,
    B,
    S,
    KVH,
    total_splits,
    table_stride,
    q_b,
    q_s,
    q_h,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    BATCH: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
):
    if EARLY:
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    blocks = tl.cdiv(S * G, ROWS)
    kv, split_idx = tl.program_id(0) // blocks, tl.program_id(1)
    b, split, num_splits = split_idx, 0, 1
    if SPLIT:
        i, lengths = load_lengths(length_ptr, B, BATCH)
        b, length, split, num_splits = find_split(
            i, lengths, split_idx, B, total_splits, S, window, KEYS, WINDOW
        )
        if num_splits == 0:
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
        q, q_factor = half_rows(q)

    last = length - S + s_at  # newest key that the row attends to
    first = first_key(length, S, window, KEYS, WINDOW)
    begin, end = split_range(first, length, split, num_splits, KEYS, False)
    table = table_ptr + b.to(tl.int64) * table_stride

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_BLOCK], tl.float32)
    pages = pages_at(table, begin, end, n, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        # Behind the end the last key again, whose probability is zero: loads without masks, and no
        # NaN in the cache is read.
        at = page_rows(pages, start, tl.minimum(n, end - 1 - start), PAGE, KEYS) * KVH + kv
        pages = pages_at(table, start + KEYS, end, n, PAGE, KEYS)
        valid = start + n < end
        k = cache_to_half(_heads(k_ptr + at[:, None] * D, d, D), KIND, False)
        v = cache_to_half(_heads(v_ptr + at[:, None] * D, d, D), KIND, False)
        s = product(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32), WIDE)
        mask = valid[None, :] & (start + n[None, :] <= last[:, None])
        if WINDOW:
            mask = mask & (start + n[None, :] > last[:, None] - window)
        if KIND != 0:
            k_scale = tl.load(k_scale_ptr + at)
            v_scale = tl.load(v_scale_ptr + at)
            s *= q_factor[:, None] * k_scale[None, :]
            p, alpha, m_i, l_i = softmax_step_scaled(
                s, mask, v_scale, m_i, l_i, inner, outer, SOFTCAP
            )
        else:
            p, alpha, m_i, l_i = softmax_step(s, mask, m_i, l_i, inner, outer, True, SOFTCAP)
        acc = product(p.to(v.dtype), v, acc * alpha[:, None], WIDE)

    if sink_ptr is not None and not SPLIT:
        l_i = with_sink(tl.load(sink_ptr + h_at), m_i, l_i)
    y = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    o_at = (split_idx.to(tl.int64) * S + s_at) * (KVH * G) + h_at  # not split: of a sequence
    o_ptrs = out_ptr + o_at[:, None] * D + d[None, :]
    if SPLIT:
        tl.store(lse_ptr + o_at, log_sum_exp(m_i, l_i), mask=inside)
        if begin < end:
            tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)


def _checked(
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
    sinks: torch.Tensor | None = None,
) -> tuple[torch.device, torch.Tensor]:
    """(the device, q as [B, S, NH, D]); raises `PykernelsError` for what ``gqa_decode`` refuses."""
    device = check_device(q, k, v, page_table, lengths)
    q = newest_tokens(q, "q")
    B, _, NH, D = q.shape
    KVH = k.shape[2] if k.ndim == 4 else 0
    if KVH < 1 or NH % KVH:
        raise PykernelsError(f"{NH} query heads on {KVH} KV heads", "Give a whole number a KV head")
    if not 16 <= D <= MAX_HEAD:
        raise PykernelsError(f"heads of {D}", f"The kernel takes 16 to {MAX_HEAD}")
    check_scores(scale, window, softcap)
    check_sinks(sinks, NH, device)
    P, page = check_cache(k, "k", (KVH, D), page_table, lengths, B)
    check_cache(v, "v", (KVH, D), page_table, lengths, B, beside=k)
    check_scales(k, k_scale, "k_scale", (P, page, KVH))
    check_scales(v, v_scale, "v_scale", (P, page, KVH))
    if v.dtype != k.dtype:
        raise PykernelsError(f"k is {k.dtype} and v {v.dtype}", "Both must be of one dtype")
    return device, q


def supports(*tensors: torch.Tensor, **options: Any) -> str | None:
    """None if ``gqa_decode`` takes these (all but max_length, out, plan), or the reason why not."""
    return why_not(_checked, *tensors, **options)


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
    sinks: torch.Tensor | None = None,
    max_length: int | None = None,
    out: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """``pykernels.ref.gqa_decode``: the same shapes, on the GPU.

    Args:
        q: bf16, any strides but the last, which is 1; D up to 512.
        k, v: bf16, or E4M3 with scales of one a token and head; contiguous.
        sinks: bf16 or float32 [NH], contiguous.
        max_length: no sequence is longer (default: what the page table can hold). It only sets how
            many splits a sequence has: lengths are read on the device.
        out: bf16 like the result, contiguous.
        plan: instead of a tuned or the shipped one.

    Returns:
        bf16 [B, (S,) NH, D].

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    device, q4 = _checked(
        q,
        k,
        v,
        page_table,
        lengths,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    window = None if window is None else int(window)  # NumPy's integers are none to Triton
    (B, S, NH, D), (page, KVH) = q4.shape, k.shape[1:3]
    result = check_out(out, q, *q.shape, dtype=torch.bfloat16)
    if result.numel() == 0:
        return result
    G = NH // KVH
    longest = page_table.shape[1] * page if max_length is None else max_length
    context = longest if window is None else min(longest, window + S - 1)
    shape = AttentionShape(NH, KVH, D, 0, D, page, window or 0, B, S, context)
    fp8, aligned = k_scale is not None, not (k.data_ptr() | v.data_ptr()) % 16
    chosen = select_decode("gqa_decode", shape, fp8, aligned, device, plan)
    tiles = triton.cdiv(S * G, chosen.rows)
    if window is not None:
        longest = min(longest, window + S - 1 + chosen.keys)
    total_splits = chosen.total_splits(B, KVH * tiles, longest, num_sms(device))
    partials = Partials(result.view(B, S * NH, D), total_splits, sinks)
    grid = (KVH * tiles, total_splits)
    where = (page_table, lengths, partials.values, partials.lse)
    scores = (sinks, *score_factors(scale, softcap), window or 0, B, S)
    strides = (total_splits, page_table.stride(0), *q4.stride()[:3])
    options = {"G": G, "PAGE": page, "WINDOW": window is not None, "SOFTCAP": softcap is not None}
    options |= {"BATCH": partials.batch, "SPLIT": partials.split, "EARLY": partials.early}
    if chosen.ring_buffer:
        # Gluon: not in the interpreter
        from .hopper import gqa_decode as ring
        from .hopper import split_kv as in_kernel

        rows, most = min(16, S * G), total_splits - B + 1
        reduces = partials.split and in_kernel.worth_it(rows, most)
        counters = in_kernel.new_counters(device, B * KVH * tiles) if reduces else (0, None)
        ring.gqa_decode_ring[grid](
            q4,
            ring.rows_of(k),
            ring.rows_of(v),
            *where,
            *scores,
            *strides,
            page_table.shape[1],
            *counters,
            result,
            **options,
            KVH=KVH,
            STAGES=chosen.num_stages,
            MULTI_TOKEN=S > 1,
            REDUCE=reduces,
            num_warps=ring.WARPS,
            **partials.launch,
        )
        if reduces:
            return result
    elif chosen.fp8_mma:
        from . import gqa_decode_fp8 as fp8_mma  # Gluon: not in the interpreter
        from .gqa_decode_fp8_mma import layouts

        keys = chosen.keys // chosen.num_warps
        in_key, in_value = layouts(chosen.num_warps, keys)
        fp8_mma.gqa_decode_fp8[grid](
            q4,
            k.view(torch.int32),
            v.view(torch.int32),
            k_scale,
            v_scale,
            *where,
            *scores,
            *strides,
            **options,
            KVH=KVH,
            KEYS=keys,
            W=chosen.num_warps,
            ROWS=chosen.rows,
            MULTI_TOKEN=S > 1,
            LK=in_key,
            LV=in_value,
            num_warps=chosen.num_warps,
            **partials.launch,
        )
    else:
        _gqa_decode[grid](
            q4,
            as_bytes(k),
            as_bytes(v),
            k_scale,
            v_scale,
            *where,
            *scores,
            KVH,
            *strides,
            **options,
            D=D,
            D_BLOCK=triton.next_power_of_2(D),
            ROWS=chosen.rows,
            KEYS=chosen.keys,
            STAGES=chosen.num_stages,
            KIND=cache_kind(k, arch(device)),
            WIDE=interpreted(),
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            **partials.launch,
        )
    partials.combine(lengths, S, window, chosen.keys)
    return result
