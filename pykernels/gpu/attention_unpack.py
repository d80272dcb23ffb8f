"""E4M3 keys and values in pages as bf16 rows, for a prefill that reads each of them many times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arith import to_bf16
from .attention_parts import cache_kind, widened
from .launch import arch
from .strides import as_bytes


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
