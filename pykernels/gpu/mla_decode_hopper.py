"""Absorbed MLA decode written out for Hopper: 64 rows and 64 keys a step, warps with roles.

The same function as ``mla_decode``'s Triton kernel, in Gluon. The result of 64 rows is half of an
SM's registers, so two warpgroups (``mla_decode_products``) hold half of its columns each, and there
is no room for a second. They compute scores and shares of the blocks by turns. One warp
(``mla_decode_copies``) keeps the copies of the tensor memory accelerator going, half a block at a
time as halves become free.

A block of keys is its values too; blocks are in two buffers (144 KiB, beside 72 of queries). What
an E4M3 cache changes is in ``mla_decode_e4m3``.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_share import share_of_slot
from .mla_decode_copies import SHARED, copies
from .mla_decode_e4m3 import decoded
from .mla_decode_products import left, right

ROWS = KEYS = 64
WARPS = 4
REGISTERS = 168
"""A thread, as launched: of the whole SM's, for three warpgroups. The roles then share them out."""
PRODUCT_REGISTERS, PRODUCT_REGISTERS_E4M3 = gl.constexpr(232), gl.constexpr(224)

LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # one dimension


@gluon.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def mla_decode_hopper(
    q_ptr, q_rope_ptr, latent, rope, latent_ptr, rope_ptr, scale_ptr, table_ptr,
    length_ptr, out_ptr, lse_ptr, inner, outer, B, S, NH, slots, table_stride,
    q_b, q_s, q_h, qr_b, qr_s, qr_h,
    PAGE: gl.constexpr, L: gl.constexpr, R: gl.constexpr, MANY: gl.constexpr,
    SOFTCAP: gl.constexpr, SPLIT: gl.constexpr, BATCH: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    gdc_wait()  # it may be launched while the kernel before it still runs
    gdc_launch_dependents()  # the combining kernel waits by itself
    slot = gl.program_id(1)
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(
            length_ptr, slot, B, slots, S, 0, 64, BATCH, 4, False
        )
    else:
        length = gl.load(length_ptr + b)
    each = gl.cdiv(gl.cdiv(length, 64), gl.maximum(parts, 1)) * 64
    begin = part * each
    end = gl.minimum(length, begin + each)
    blocks = gl.maximum(gl.cdiv(end - begin, 64), 0)
    first, rows = gl.program_id(0) * 64, S * NH
    if SPLIT:
        rows = gl.where(parts > 0, rows, 0)  # a slot of no sequence writes nothing
        blocks = gl.where(parts > 0, blocks, 0)
    b = b.to(gl.int64)
    table = table_ptr + b * table_stride
    q, q_r = q_ptr + b * q_b, q_rope_ptr + b * qr_b
    at = slot.to(gl.int64) * (S * NH)  # not split: slots are sequences
    out, lse = out_ptr + at * L, lse_ptr + at

    KIND: gl.constexpr = gl.float16 if E4M3 else gl.bfloat16
    q_left = gl.allocate_shared_memory(KIND, [1, 64, 256], SHARED)
    q_right = gl.allocate_shared_memory(KIND, [1, 64, 256], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, R], SHARED)
    k_left = gl.allocate_shared_memory(KIND, [2, 64, 256], SHARED)
    k_right = gl.allocate_shared_memory(KIND, [2, 64, 256], SHARED)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, R], SHARED)
    k_scale = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    shares = gl.allocate_shared_memory(KIND, [1, 64, 64], SHARED)
    tops = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    factors = gl.allocate_shared_memory(gl.float32, [64], LINE)
    MB: gl.constexpr = mbarrier.MBarrierLayout()
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    scored = gl.allocate_shared_memory(gl.int64, [1], MB)
    both = gl.allocate_shared_memory(gl.int64, [1], MB)
    for i in gl.static_range(2):
        mbarrier.init(left_full.index(i), count=2 if E4M3 else 1)
        mbarrier.init(right_full.index(i), count=1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(scored, count=1)
    mbarrier.init(both, count=2)

    PRODUCTS: gl.constexpr = PRODUCT_REGISTERS_E4M3 if E4M3 else PRODUCT_REGISTERS
    gl.warp_specialize(
        [
            (decoded if E4M3 else copies, (
                latent, rope, latent_ptr, rope_ptr, scale_ptr, table, begin, end, blocks,
                k_left, k_right, k_rope, k_scale, left_full, right_full, left_empty, right_empty,
                L, PAGE,
            )),
            (left, (
                q, q_r, first, rows, NH, S, q_s, q_h, qr_s, qr_h, length, begin, end, blocks,
                inner, outer, out, lse, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
                shares, tops, totals, factors, left_full, right_full, left_empty, right_empty,
                ready, scored, both, L, MANY, SOFTCAP, SPLIT, E4M3,
            )),
            (right, (
                q, q_r, first, rows, NH, S, q_s, q_h, qr_s, qr_h, length, begin, end, blocks,
                inner, outer, out, lse, q_left, q_right, q_rope, k_left, k_right, k_rope, k_scale,
                shares, tops, totals, factors, left_full, right_full, left_empty, right_empty,
                ready, scored, both, L, MANY, SOFTCAP, SPLIT, E4M3,
            )),
        ],
        [4, 4], [PRODUCTS, PRODUCTS],
    )  # fmt: skip


def rows_of(pages: torch.Tensor, width: int) -> Any:
    """A cache [P, page, N] for the tensor memory accelerator: its rows, ``width`` columns a time.

    A copy is of 64 rows, or of a page if that has fewer.
    """
    P, page, N = pages.shape
    return TensorDescriptor(pages, [P * page, N], [N, 1], [min(page, 64), width], SHARED.value)
