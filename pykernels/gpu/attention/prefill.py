"""Causal attention of many tokens a sequence: FlashAttention-2 for GQA heads and MLA's 128 + 64.

A CTA takes a block of queries of one head and runs over the keys that they may attend to: blocks
that a mask cuts (the window's edge, the diagonal, the end) apart from those that need none.

Where many queries read each key, keys and values of a paged E4M3 cache are dequantized to rows of
bf16 first. Hopper has a warp-specialised kernel for bf16: ``hopper.prefill``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...shapes import Ragged
from ..common.bf16 import to_bf16
from ..common.launch import arch, check_device, interpreted
from ..common.strides import as_bytes, check_out
from ..plans.attention import MAX_HEAD, PrefillPlan, worth_unpacking
from ..plans.attention_shape import AttentionShape
from .checks import check_rows, check_scores, check_sinks
from .online_softmax import (
    cache_kind,
    cache_to_bf16,
    page_rows,
    pages_at,
    product,
    score_factors,
    softmax_step,
    with_sink,
)
from .select import select_prefill

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Inputs:
    """What both prefill ops are made of.

    Attributes:
        q, k, v: [TQ, NH, D], [TK, KVH, D], [TK, KVH, DV]; of a paged cache, TK = P * page.
        rope: the rotated parts that MLA keeps apart: [TQ, NH, R], [TK, R].
        scales: of E4M3 keys and values, float32 [P, page, KVH].
        page: tokens of one, 0 without pages.
        scale, window, softcap, sinks: of the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: Ragged
    scale: float
    softcap: float | None
    window: int | None = None
    page: int = 0
    rope: Pair = (None, None)
    scales: Pair = (None, None)
    sinks: torch.Tensor | None = None

    @property
    def R(self) -> int:
        return 0 if self.rope[0] is None else self.rope[0].shape[-1]

    @property
    def shape(self) -> AttentionShape:
        (_, NH, D), (KVH, DV), table = self.q.shape, self.v.shape[1:], self.batch.page_table
        if table is None:
            context = self.k.shape[0] // max(1, self.batch.B)
        else:
            context = table.shape[1] * self.page
        near = (self.batch.B, self.batch.max_queries, context)
        return AttentionShape(NH, KVH, D, self.R, DV, self.page, self.window or 0, *near)


@triton.jit(do_not_specialize=["most", "table_stride"])
def _unpack(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, k_out_ptr, v_out_ptr, start_ptr,
    most, table_stride, KIND: tl.constexpr, PAGE: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + b)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // KVH, row % KVH
    valid = token < length
    if tl.program_id(0) == 0:
        tl.store(start_ptr + b, (b * most).to(tl.int32))
    page = tl.load(table_ptr + b * table_stride + token // PAGE, mask=valid, other=0)
    at = (page.to(tl.int64) * PAGE + token % PAGE) * KVH + head
    to = (b * most + token) * KVH + head
    d = tl.arange(0, D_BLOCK)
    mask = valid[:, None] & (d < D)[None, :]
    k = cache_to_bf16(tl.load(k_ptr + at[:, None] * D + d[None, :], mask=mask, other=0), KIND)
    k = k.to(tl.float32) * tl.load(k_scale_ptr + at, mask=valid, other=0.0)[:, None]
    tl.store(k_out_ptr + to[:, None] * D + d[None, :], to_bf16(k), mask=mask)
    v = cache_to_bf16(tl.load(v_ptr + at[:, None] * D + d[None, :], mask=mask, other=0), KIND)
    v = v.to(tl.float32) * tl.load(v_scale_ptr + at, mask=valid, other=0.0)[:, None]
    tl.store(v_out_ptr + to[:, None] * D + d[None, :], to_bf16(v), mask=mask)


def unpacked(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor,
    table: torch.Tensor, lengths: torch.Tensor, page: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(keys, values, each sequence's first row) of k, v [P * page, KVH, D] with their scales.

    There is room for as many keys as the table has; rows behind a sequence's end are left unset.
    """
    (_, KVH, D), (B, pages), most = k.shape, table.shape, table.shape[1] * page
    rows = (torch.empty(B * most, KVH, D, dtype=torch.bfloat16, device=k.device) for _ in "kv")
    k_rows, v_rows = rows
    starts = torch.empty(B, dtype=torch.int32, device=k.device)
    ROWS = 64 if D <= 256 else 16
    _unpack[(triton.cdiv(pages * page * KVH, ROWS), B)](
        as_bytes(k), as_bytes(v), k_scale, v_scale, table, lengths, k_rows, v_rows, starts, most,
        table.stride(0), cache_kind(k, arch(k.device)), page, KVH, D, triton.next_power_of_2(D),
        ROWS, num_warps=4,
    )  # fmt: skip
    return k_rows, v_rows, starts


@triton.jit
def _keys(
    q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, first_row, m_i, l_i, acc,
    begin, end, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys ``begin .. end``; MASKED: a mask cuts some block."""
    ROWS: tl.constexpr = q.shape[0]
    D_BLOCK: tl.constexpr = q.shape[1]
    V_BLOCK: tl.constexpr = acc.shape[1]
    n, d, dv = tl.arange(0, KEYS), tl.arange(0, D_BLOCK), tl.arange(0, V_BLOCK)
    pages = 0
    if PAGE:
        pages = pages_at(table, begin, keys, n, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        valid = start + n < keys
        if PAGE:
            at = page_rows(pages, start, n, PAGE, KEYS)
            pages = pages_at(table, start + KEYS, keys, n, PAGE, KEYS)
        else:
            at = first_row + start + n
        k_ptrs = k_ptr + at[:, None] * k_t + d[None, :]
        v_ptrs = v_ptr + at[:, None] * v_t + dv[None, :]
        if MASKED or D != D_BLOCK or DV != V_BLOCK:
            k = tl.load(k_ptrs, mask=valid[:, None] & (d < D)[None, :], other=0)
            v = tl.load(v_ptrs, mask=valid[:, None] & (dv < DV)[None, :], other=0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        k = cache_to_bf16(k, KIND)
        v = cache_to_bf16(v, KIND)
        s = tl.zeros([ROWS, KEYS], tl.float32)
        if R > 0:
            kr_ptrs = k_rope_ptr + at[:, None] * kr_t + tl.arange(0, R)[None, :]
            if MASKED:
                k_rope = tl.load(kr_ptrs, mask=valid[:, None], other=0.0)
            else:
                k_rope = tl.load(kr_ptrs)
            s = product(q_rope, tl.trans(k_rope), s, WIDE)
        s = product(q, tl.trans(k), s, WIDE)
        if KIND != 0:
            s *= tl.load(k_scale_ptr + at * scale_t, mask=valid, other=0.0)[None, :]
        mask = s  # not read
        if MASKED:
            mask = valid[None, :] & (start + n[None, :] <= at_q[:, None])
            if WINDOW:
                mask = mask & (start + n[None, :] > at_q[:, None] - window)
        p, alpha, m_i, l_i = softmax_step(s, mask, m_i, l_i, inner, outer, MASKED, SOFTCAP)
        if KIND != 0:
            p *= tl.load(v_scale_ptr + at * scale_t, mask=valid, other=0.0)[None, :]
        acc = product(p.to(tl.bfloat16), v, acc * alpha[:, None], WIDE)
    return m_i, l_i, acc


@triton.jit
def _prefill(
    q_ptr, q_rope_ptr, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, q_start_ptr,
    q_length_ptr, k_start_ptr, k_length_ptr, table_ptr, out_ptr, sink_ptr, inner, outer, window,
    table_stride, q_t, q_h, qr_t, qr_h, k_t, k_h, kr_t, v_t, v_h, scale_t, o_t, o_h,
    KIND: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    DV: tl.constexpr, V_BLOCK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(2), tl.program_id(1)
    far, kv = head.to(tl.int64), (head // G).to(tl.int64)  # heads may be 2 ** 31 elements apart
    queries = tl.load(q_length_ptr + b)
    # The last queries attend to the most keys: the longest CTAs start first.
    q_begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if q_begin >= queries:
        return
    keys = tl.load(k_length_ptr + b)
    q_row = tl.load(q_start_ptr + b).to(tl.int64)
    k_row = tl.zeros([], tl.int64)
    if PAGE == 0:
        k_row += tl.load(k_start_ptr + b)

    d, dv = tl.arange(0, D_BLOCK), tl.arange(0, V_BLOCK)
    i = q_begin + tl.arange(0, ROWS)
    inside = i < queries
    rows = q_row + i
    q_mask = inside[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (rows * q_t + far * q_h)[:, None] + d[None, :], mask=q_mask, other=0.0)
    q_rope = q
    if R > 0:
        qr_ptrs = q_rope_ptr + (rows * qr_t + far * qr_h)[:, None] + tl.arange(0, R)[None, :]
        q_rope = tl.load(qr_ptrs, mask=inside[:, None], other=0.0)

    past = keys - queries  # keys before the first query
    at_q = past + i
    end = tl.minimum(keys, past + q_begin + ROWS)  # behind the last key of any row
    # Blocks from ``unmasked`` to ``causal`` need no mask: neither the window's edge nor the
    # diagonal nor the end cuts them.
    causal = tl.maximum(0, tl.minimum(keys, past + q_begin + 1)) // KEYS * KEYS
    begin = 0
    unmasked = 0
    if WINDOW:
        begin = tl.maximum(0, past + q_begin + 1 - window) // KEYS * KEYS
        unmasked = tl.maximum(0, past + q_begin + ROWS - window + KEYS - 1) // KEYS * KEYS
        causal = tl.maximum(causal, begin)
        unmasked = tl.minimum(unmasked, causal)

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
    table = table_ptr
    if PAGE:
        table += b.to(tl.int64) * table_stride
    if KIND != 0:
        k_scale_ptr += kv
        v_scale_ptr += kv
    k_ptr += kv * k_h
    v_ptr += kv * v_h
    if WINDOW:
        m_i, l_i, acc = _keys(
            q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, k_row, m_i, l_i,
            acc, begin, unmasked, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
            KIND, PAGE, D, DV, R, KEYS, STAGES, True, WINDOW, SOFTCAP, WIDE,
        )  # fmt: skip
    m_i, l_i, acc = _keys(
        q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, k_row, m_i, l_i, acc,
        unmasked, causal, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
        KIND, PAGE, D, DV, R, KEYS, STAGES, False, WINDOW, SOFTCAP, WIDE,
    )  # fmt: skip
    m_i, l_i, acc = _keys(
        q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, k_row, m_i, l_i, acc,
        causal, end, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
        KIND, PAGE, D, DV, R, KEYS, STAGES, True, WINDOW, SOFTCAP, WIDE,
    )  # fmt: skip
    if sink_ptr is not None:
        l_i = with_sink(tl.load(sink_ptr + head), m_i, l_i)
    y = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    o_mask = inside[:, None] & (dv < DV)[None, :]
    o_ptrs = out_ptr + (rows * o_t + head * o_h)[:, None] + dv[None, :]
    tl.store(o_ptrs, y.to(out_ptr.dtype.element_ty), mask=o_mask)


def _aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether every row of every head begins at a multiple of 16 bytes, and Triton can tell.

    And all heads lie within 2 ** 31 elements: copies count columns in 32 bits.
    """
    given = [x for x in tensors if x is not None]
    return all(
        x.dtype == torch.bfloat16
        and x.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in x.stride()[:-1])
        and (x.ndim < 3 or x.shape[1] * x.stride(1) < 1 << 31)
        for x in given
    )


def _unpacks(given: Inputs) -> bool:
    """Whether keys and values in E4M3 should become rows of bf16 first."""
    table = given.batch.page_table
    if given.scales[0] is None or table is None:
        return False
    (NH, D), (KVH, DV) = given.q.shape[1:], given.v.shape[1:]
    nbytes = table.numel() * given.page * KVH * (D + DV) * 2
    return worth_unpacking(given.batch.max_queries * NH // KVH, nbytes)


def checked(given: Inputs, plan: PrefillPlan | None = None) -> PrefillPlan:
    """The given plan, a tuned or the shipped one; raises `PykernelsError` where none fits."""
    (q, k, v), (q_rope, k_rope), batch = (given.q, given.k, given.v), given.rope, given.batch
    fp8 = given.scales[0] is not None
    rows = {"q": q, "q_rope": q_rope, "k_rope": k_rope} | ({} if fp8 else {"k": k, "v": v})
    for name, x in rows.items():
        if x is not None:
            check_rows(x, name)
    where = (batch.q_starts, batch.q_lengths, batch.k_lengths, batch.k_starts, batch.page_table)
    device = check_device(*(x for x in (q, k, v, q_rope, k_rope, *where) if x is not None))
    (_, NH, D), (KVH, DV) = q.shape, v.shape[1:]
    if KVH < 1 or NH % KVH or k.shape[1] != KVH:
        raise PykernelsError(f"{NH} query heads on {KVH} KV heads", "Give a whole number a KV head")
    if not (16 <= D <= MAX_HEAD and 16 <= DV <= MAX_HEAD) or k.shape[2] != D:
        raise PykernelsError(
            f"heads of {D} on {k.shape[2]} and {DV}",
            f"The kernel takes 16 to {MAX_HEAD}, q and k alike",
        )
    check_scores(given.scale, given.window, given.softcap)
    check_sinks(given.sinks, NH, device)
    return select_prefill(given.shape, fp8, _unpacks(given), _aligned(*rows.values()), device, plan)


def launch(given: Inputs, out: torch.Tensor | None, plan: PrefillPlan | None) -> torch.Tensor:
    """What both ops do once their inputs are in order."""
    chosen = checked(given, plan)
    (q, k, v), (q_rope, k_rope), batch = (given.q, given.k, given.v), given.rope, given.batch
    (TQ, NH, D), (KVH, DV) = q.shape, v.shape[1:]
    result = check_out(out, q, TQ, NH, DV, dtype=torch.bfloat16)
    blocks = triton.cdiv(batch.max_queries, chosen.rows)
    if result.numel() == 0 or blocks * batch.B == 0:
        return result
    scales, page = given.scales, given.page
    k_scale, v_scale = scales
    if chosen.unpack and k_scale is not None and v_scale is not None:
        assert batch.page_table is not None  # E4M3 is in pages
        k, v, starts = unpacked(k, v, k_scale, v_scale, batch.page_table, batch.k_lengths, page)
        batch = replace(batch, page_table=None, k_starts=starts)
        scales, page = (None, None), 0
    table = batch.page_table
    factors = score_factors(given.scale, given.softcap)
    scores = (given.sinks, *factors, int(given.window or 0))
    where = (batch.q_starts, batch.q_lengths, batch.k_starts, batch.k_lengths)
    q_strides = (*q.stride()[:2], *(q_rope.stride()[:2] if q_rope is not None else (0, 0)))
    k_strides = (*k.stride()[:2], k_rope.stride(0) if k_rope is not None else 0, *v.stride()[:2])
    options = {"G": NH // KVH, "D": D, "DV": DV, "R": given.R, "KEYS": chosen.keys, "PAGE": page}
    options |= {"WINDOW": given.window is not None, "SOFTCAP": given.softcap is not None}
    if chosen.warp_specialized and k.shape[0]:  # copies of nothing cannot be described
        from .hopper.prefill import launch_hopper  # Gluon: not in the interpreter

        launch_hopper(q, q_rope, k, k_rope, v, batch, result, scores, options, chosen)
        return result
    _prefill[(blocks, NH, batch.B)](
        q, q_rope, as_bytes(k), k_rope, as_bytes(v), *scales, *where, table, result, *scores,
        0 if table is None else table.stride(0), *q_strides, *k_strides, KVH,
        *result.stride()[:2], **options, KIND=cache_kind(k, arch(q.device)),
        D_BLOCK=triton.next_power_of_2(D), V_BLOCK=triton.next_power_of_2(DV), ROWS=chosen.rows,
        STAGES=chosen.num_stages, WIDE=interpreted(), num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip
    return result
