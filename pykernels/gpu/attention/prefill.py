"""Causal attention of many tokens a sequence: one kernel for GQA heads and for MLA's 128 + 64.

A program takes a block of queries of one head and runs over the keys that they may see: blocks that
a mask cuts (the window's edge, the diagonal, the end) apart from those that all rows see whole.

E4M3 keys and values in pages as bf16 rows, for a prefill that reads each of them many times.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ...shapes import Ragged
from ..common.bf16 import to_bf16
from ..common.launch import arch, check_device, interpreted
from ..common.strides import as_bytes, check_out
from ..plans.attention import PrefillPlan, warp_specialized_prefills, worth_unpacking
from ..plans.attention_shape import AttentionShape
from .checks import check_rows, check_scores
from .online_softmax import (
    cache_kind,
    page_rows,
    pages_at,
    product,
    score_factors,
    softmax_step,
    widened,
)
from .select import select_prefill


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
    there = token < length
    if tl.program_id(0) == 0:
        tl.store(start_ptr + b, (b * most).to(tl.int32))
    page = tl.load(table_ptr + b * table_stride + token // PAGE, mask=there, other=0)
    at = (page.to(tl.int64) * PAGE + token % PAGE) * KVH + head
    to = (b * most + token) * KVH + head
    d = tl.arange(0, D_BLOCK)
    mask = there[:, None] & (d < D)[None, :]
    k = widened(tl.load(k_ptr + at[:, None] * D + d[None, :], mask=mask, other=0), KIND)
    k = k.to(tl.float32) * tl.load(k_scale_ptr + at, mask=there, other=0.0)[:, None]
    tl.store(k_out_ptr + to[:, None] * D + d[None, :], to_bf16(k), mask=mask)
    v = widened(tl.load(v_ptr + at[:, None] * D + d[None, :], mask=mask, other=0), KIND)
    v = v.to(tl.float32) * tl.load(v_scale_ptr + at, mask=there, other=0.0)[:, None]
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
    ROWS = 64
    _unpack[(triton.cdiv(pages * page * KVH, ROWS), B)](
        as_bytes(k), as_bytes(v), k_scale, v_scale, table, lengths, k_rows, v_rows, starts, most,
        table.stride(0), cache_kind(k, arch(k.device)), page, KVH, D, triton.next_power_of_2(D),
        ROWS, num_warps=4,
    )  # fmt: skip
    return k_rows, v_rows, starts


pass

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


@triton.jit
def _keys(
    q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, first_row, m, total, acc,
    begin, end, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The running softmax over the keys ``begin .. end``; MASKED: some row may not see some."""
    ROWS: tl.constexpr = q.shape[0]
    D_BLOCK: tl.constexpr = q.shape[1]
    V_BLOCK: tl.constexpr = acc.shape[1]
    n, d, dv = tl.arange(0, KEYS), tl.arange(0, D_BLOCK), tl.arange(0, V_BLOCK)
    pages = 0
    if PAGE:
        pages = pages_at(table, begin, keys, n, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        there = start + n < keys
        if PAGE:
            at = page_rows(pages, start, n, PAGE, KEYS)
            pages = pages_at(table, start + KEYS, keys, n, PAGE, KEYS)
        else:
            at = first_row + start + n
        k_ptrs = k_ptr + at[:, None] * k_t + d[None, :]
        v_ptrs = v_ptr + at[:, None] * v_t + dv[None, :]
        if MASKED or D != D_BLOCK or DV != V_BLOCK:
            k = tl.load(k_ptrs, mask=there[:, None] & (d < D)[None, :], other=0)
            v = tl.load(v_ptrs, mask=there[:, None] & (dv < DV)[None, :], other=0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        k = widened(k, KIND)
        v = widened(v, KIND)
        s = tl.zeros([ROWS, KEYS], tl.float32)
        if R > 0:
            kr_ptrs = k_rope_ptr + at[:, None] * kr_t + tl.arange(0, R)[None, :]
            if MASKED:
                k_rope = tl.load(kr_ptrs, mask=there[:, None], other=0.0)
            else:
                k_rope = tl.load(kr_ptrs)
            s = product(q_rope, tl.trans(k_rope), s, WIDE)
        s = product(q, tl.trans(k), s, WIDE)
        if KIND != 0:
            s *= tl.load(k_scale_ptr + at * scale_t, mask=there, other=0.0)[None, :]
        seen = s  # of no use
        if MASKED:
            seen = there[None, :] & (start + n[None, :] <= at_q[:, None])
            if WINDOW:
                seen = seen & (start + n[None, :] > at_q[:, None] - window)
        p, alpha, m, total = softmax_step(s, seen, m, total, inner, outer, MASKED, SOFTCAP)
        if KIND != 0:
            p *= tl.load(v_scale_ptr + at * scale_t, mask=there, other=0.0)[None, :]
        acc = product(p.to(tl.bfloat16), v, acc * alpha[:, None], WIDE)
    return m, total, acc


@triton.jit
def _prefill(
    q_ptr, q_rope_ptr, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, q_start_ptr,
    q_length_ptr, k_start_ptr, k_length_ptr, table_ptr, out_ptr, inner, outer, window,
    table_stride, q_t, q_h, qr_t, qr_h, k_t, k_h, kr_t, v_t, v_h, scale_t, o_t, o_h,
    KIND: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    DV: tl.constexpr, V_BLOCK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(2), tl.program_id(1)
    far, kv = head.to(tl.int64), (head // G).to(tl.int64)  # heads may be 2 ** 31 elements apart
    queries = tl.load(q_length_ptr + b)
    # The last queries see the most keys: the longest programs start first.
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
    end = tl.minimum(keys, past + q_begin + ROWS)  # behind the last key that any row sees
    whole = tl.maximum(0, tl.minimum(keys, past + q_begin + 1)) // KEYS * KEYS
    begin = 0
    clear = 0  # first block that no row's window cuts
    if WINDOW:
        begin = tl.maximum(0, past + q_begin + 1 - window) // KEYS * KEYS
        clear = tl.maximum(0, past + q_begin + ROWS - window + KEYS - 1) // KEYS * KEYS
        whole = tl.maximum(whole, begin)
        clear = tl.minimum(clear, whole)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
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
        m, total, acc = _keys(
            q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, k_row, m, total,
            acc, begin, clear, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
            KIND, PAGE, D, DV, R, KEYS, STAGES, True, WINDOW, SOFTCAP, WIDE,
        )  # fmt: skip
    m, total, acc = _keys(
        q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, k_row, m, total, acc,
        clear, whole, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
        KIND, PAGE, D, DV, R, KEYS, STAGES, False, WINDOW, SOFTCAP, WIDE,
    )  # fmt: skip
    m, total, acc = _keys(
        q, q_rope, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, k_row, m, total, acc,
        whole, end, keys, at_q, inner, outer, window, k_t, kr_t, v_t, scale_t,
        KIND, PAGE, D, DV, R, KEYS, STAGES, True, WINDOW, SOFTCAP, WIDE,
    )  # fmt: skip
    y = acc / tl.where(total == 0, 1.0, total)[:, None]
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


def checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Pair, scales: Pair, batch: Ragged,
    page: int, scale: float, window: int | None, softcap: float | None,
    *, plan: PrefillPlan | None,
) -> PrefillPlan:  # fmt: skip
    """The given plan, a tuned or the shipped one; raises `PykernelsError` where none fits."""
    q_rope, k_rope = rope
    given = {"q": q, "q_rope": q_rope, "k_rope": k_rope}
    given |= {"k": k, "v": v} if scales[0] is None else {}
    for name, x in given.items():
        if x is not None:
            check_rows(x, name)
    table = batch.page_table
    where = (batch.q_starts, batch.q_lengths, batch.k_lengths, batch.k_starts, table)
    device = check_device(*(x for x in (q, k, v, q_rope, k_rope, *where) if x is not None))
    (_, NH, D), (KVH, DV) = q.shape, v.shape[1:]
    R = 0 if q_rope is None else q_rope.shape[-1]
    if KVH < 1 or NH % KVH or k.shape[1] != KVH:
        raise PykernelsError(f"{NH} query heads on {KVH} KV heads", "Give a whole number a KV head")
    if not (16 <= D <= 256 and 16 <= DV <= 256) or k.shape[2] != D:
        raise PykernelsError(
            f"heads of {D} on {k.shape[2]} and {DV}", "The kernel takes 16 to 256, q and k alike"
        )
    check_scores(scale, window, softcap)
    fp8 = scales[0] is not None
    rows = _aligned(q, q_rope, k_rope, *(() if fp8 else (k, v)))
    unpack = False
    if fp8 and table is not None:
        room = table.numel() * page * KVH * (D + DV) * 2
        unpack = worth_unpacking(batch.max_queries * NH // KVH, room)
    longest = k.shape[0] // max(1, batch.B) if table is None else table.shape[1] * page
    near = (batch.B, batch.max_queries, longest)
    shape = AttentionShape(NH, KVH, D, R, DV, page, window or 0, *near)
    chosen = plan or select_prefill(shape, fp8, unpack, rows, device)
    if chosen.warp_specialized and not warp_specialized_prefills(
        D, DV, R, fp8, chosen, rows, page, device
    ):
        raise PykernelsError(
            f"the kernel by hand takes no heads of {D} + {R} and {DV} like these on this GPU",
            "Give a plan without warp_specialized",
        )
    return chosen


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Pair, scales: Pair, batch: Ragged,
    page: int, scale: float, window: int | None, softcap: float | None,
    *, out: torch.Tensor | None, plan: PrefillPlan | None,
) -> torch.Tensor:  # fmt: skip
    """Both launchers' common half: k [TK, KVH, D], v [TK, KVH, DV]; ``page`` 0: not paged."""
    chosen = checked(q, k, v, rope, scales, batch, page, scale, window, softcap, plan=plan)
    (q_rope, k_rope), device = rope, q.device
    (TQ, NH, D), (KVH, DV) = q.shape, v.shape[1:]
    R = 0 if q_rope is None else q_rope.shape[-1]
    result = check_out(out, q, TQ, NH, DV, dtype=torch.bfloat16)
    blocks = triton.cdiv(batch.max_queries, chosen.rows)
    if result.numel() == 0 or blocks * batch.B == 0:
        return result
    k_scale, v_scale = scales
    if chosen.unpack and k_scale is not None and v_scale is not None:
        assert batch.page_table is not None  # E4M3 is in pages
        lengths = batch.k_lengths
        k, v, starts = unpacked(k, v, k_scale, v_scale, batch.page_table, lengths, page)
        batch = replace(batch, page_table=None, k_starts=starts)
        scales, page = (None, None), 0
    table = batch.page_table
    grid, factors = (blocks, NH, batch.B), (*score_factors(scale, softcap), int(window or 0))
    where = (batch.q_starts, batch.q_lengths, batch.k_starts, batch.k_lengths)
    q_strides = (*q.stride()[:2], *(q_rope.stride()[:2] if q_rope is not None else (0, 0)))
    k_strides = (*k.stride()[:2], k_rope.stride(0) if k_rope is not None else 0, *v.stride()[:2])
    options = {"G": NH // KVH, "D": D, "DV": DV, "R": R, "KEYS": chosen.keys}
    options |= {"WINDOW": window is not None, "SOFTCAP": softcap is not None}
    if chosen.warp_specialized and k.shape[0]:  # copies of nothing cannot be described
        from .hopper.prefill import launch_hopper  # Gluon: not in the interpreter

        options |= {"PAGE": page}
        launch_hopper(q, q_rope, k, k_rope, v, batch, result, factors, options, chosen)
        return result
    _prefill[grid](
        q, q_rope, as_bytes(k), k_rope, as_bytes(v), *scales, *where, table, result, *factors,
        0 if table is None else table.stride(0), *q_strides, *k_strides, KVH,
        *result.stride()[:2], **options, KIND=cache_kind(k, arch(device)), PAGE=page,
        D_BLOCK=triton.next_power_of_2(D), V_BLOCK=triton.next_power_of_2(DV), ROWS=chosen.rows,
        STAGES=chosen.stages, WIDE=interpreted(), num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return result
