"""Causal prefill for Hopper, warp-specialised: FlashAttention-3's schedule.

The same function as ``prefill``'s Triton kernel for bf16 keys, in Gluon. A producer warpgroup
(``prefill_loads``) keeps two blocks of keys and of values ahead by the tensor memory accelerator;
two consumers (``prefill_mma``) take 64 queries each. CTAs are persistent.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....shapes import Ragged
from ...common.launch import num_sms
from ...plans.attention import PrefillPlan
from .prefill_loads import STAGES, producer
from .prefill_mma import consumer

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
NUMBER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit(do_not_specialize=["window", "B", "blocks", "tiles", "at_a_time", "table_stride"])
def prefill_hopper(
    q_desc,
    qr_desc,
    k_desc,
    kr_desc,
    v_desc,
    q_start_ptr,
    q_length_ptr,
    k_start_ptr,
    k_length_ptr,
    table_ptr,
    out_ptr,
    sink_ptr,
    inner,
    outer,
    window,
    q_h,
    qr_h,
    k_h,
    v_h,
    o_t,
    o_h,
    B,
    blocks,
    tiles,
    at_a_time,
    counter_ptr,
    table_stride,
    PAGE: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    R: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    qs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], SHARED)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], SHARED)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DV], SHARED)
    q_ropes, k_ropes = qs, ks  # not read without a rotated part
    if R > 0:
        q_ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, R], SHARED)
        k_ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, R], SHARED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    n_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    n_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    nexts = gl.allocate_shared_memory(gl.int64, [2, 1], NUMBER)
    tail = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(tail.index(0), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(n_full.index(slot), count=1)
        mbarrier.init(n_empty.index(slot), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (producer, (
                q_desc, qr_desc, k_desc, kr_desc, v_desc, q_start_ptr, q_length_ptr, k_start_ptr,
                k_length_ptr, table_ptr, table_stride, window, q_h, qr_h, k_h, v_h, B, blocks,
                tiles, at_a_time, counter_ptr, qs, q_ropes, ks, k_ropes, vs, q_full, q_empty,
                k_full, k_empty, v_full, v_empty, tail, nexts, n_full, n_empty, PAGE, G, D, DV, R,
                KEYS, WINDOW,
            )),
            (consumer, (
                q_start_ptr, q_length_ptr, k_length_ptr, out_ptr, sink_ptr, inner, outer, window,
                o_t, o_h, B, blocks, tiles, at_a_time, qs, q_ropes, ks, k_ropes, vs, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, nexts, n_full, n_empty, DV, R, KEYS,
                WINDOW, SOFTCAP,
                gl.constexpr(0),
            )),
            (consumer, (
                q_start_ptr, q_length_ptr, k_length_ptr, out_ptr, sink_ptr, inner, outer, window,
                o_t, o_h, B, blocks, tiles, at_a_time, qs, q_ropes, ks, k_ropes, vs, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, nexts, n_full, n_empty, DV, R, KEYS,
                WINDOW, SOFTCAP,
                gl.constexpr(1),
            )),
        ],
        [4, 4],
        [240, 240],
    )
    # fmt: on


L2 = 32 << 20
"""Bytes of keys and values that are read at a time: most of Hopper's second-level cache."""


def described(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """[T, heads, width] as a matrix with all heads in a row; ``rows`` of one head are copied."""
    T, heads, width = x.shape
    columns = (heads - 1) * x.stride(1) + width
    return TensorDescriptor(x, [T, columns], [x.stride(0), 1], [rows, width], SHARED.value)


def _at_a_time(rows: int, k: torch.Tensor, v: torch.Tensor, G: int) -> int:
    """Query heads that run beside each other: those of as many KV heads as L2 holds."""
    KVH = k.shape[1]
    each = 2 * rows * (k.shape[2] + v.shape[2])
    return G * max(n for n in range(1, KVH + 1) if KVH % n == 0 and (n == 1 or n * each <= L2))


def launch_hopper(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    k: torch.Tensor,
    k_rope: torch.Tensor | None,
    v: torch.Tensor,
    batch: Ragged,
    out: torch.Tensor,
    scores: tuple[Any, ...],
    options: dict[str, Any],
    plan: PrefillPlan,
) -> None:
    """``scores``: sinks, inner, outer, window; ``options``: the kernel's constants."""
    NH, G, page, table = q.shape[1], options["G"], options["PAGE"], batch.page_table
    piece = min(page or plan.keys, plan.keys)  # rows of keys of one copy
    q_desc, k_desc, v_desc = described(q, 64), described(k, piece), described(v, piece)
    qr_desc, kr_desc, qr_h = q_desc, k_desc, 0  # not read without a rotated part
    if q_rope is not None and k_rope is not None:
        qr_desc, kr_desc = described(q_rope, 64), described(k_rope[:, None], piece)
        qr_h = q_rope.stride(1)
    rows = k.shape[0] if table is None else min(k.shape[0], table.numel() * page)
    blocks = triton.cdiv(batch.max_queries, 128)
    tiles = blocks * NH * batch.B
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    prefill_hopper[min(tiles, num_sms(q.device)),](
        q_desc,
        qr_desc,
        k_desc,
        kr_desc,
        v_desc,
        batch.q_starts,
        batch.q_lengths,
        batch.k_starts,
        batch.k_lengths,
        table,
        out,
        *scores,
        q.stride(1),
        qr_h,
        k.stride(1),
        v.stride(1),
        *out.stride()[:2],
        batch.B,
        blocks,
        tiles,
        _at_a_time(rows, k, v, G),
        counter,
        0 if table is None else table.stride(0),
        **options,
        num_warps=4,
    )
