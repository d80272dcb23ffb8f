"""Absorbed MLA decode for Hopper, warp-specialised as FlashMLA is: 64 rows, 64 keys a step.

The same function as ``mla_decode``'s Triton kernel, in Gluon. The accumulator of 64 rows is half of
an SM's registers, so two consumer warpgroups (``mla_decode_mma``) hold half of its columns each,
and there is no room for a second accumulator. They compute the scores and probabilities of the
blocks by turns. A producer warp (``mla_decode_loads``) keeps the copies of the tensor memory
accelerator going, half a block at a time as halves become free.

A block of keys is its values too; there are two buffers of a block (144 KiB, beside 72 of queries).
What an E4M3 cache changes is in ``mla_decode_fp8``.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .mla_decode_fp8 import dequantize_producer
from .mla_decode_loads import SHARED, producer
from .mla_decode_mma import consumer_left, consumer_right

ROWS = KEYS = 64
WARPS = 4
REGISTERS = 168
"""A thread, as launched: all of the SM's for three warpgroups. The roles then reallocate them."""
CONSUMER_REGISTERS, CONSUMER_REGISTERS_E4M3 = gl.constexpr(232), gl.constexpr(224)

PIECE = gl.constexpr(128)  # columns of bf16 keys that are copied, and waited for, as one
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # one dimension


@gluon.jit(do_not_specialize=["B", "total_splits", "table_stride"])  # a batch compiles nothing new
def mla_decode_hopper(
    q_ptr,
    q_rope_ptr,
    latent,
    rope,
    scale_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    stats_ptr,
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
    PAGE: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
    MULTI_TOKEN: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr,
    BATCH: gl.constexpr,
    E4M3: gl.constexpr,
):
    # All this is ready before the kernel in front has ended: the roles wait for that.
    KIND: gl.constexpr = gl.float16 if E4M3 else gl.bfloat16
    q_left = gl.allocate_shared_memory(KIND, [1, 64, 256], SHARED)
    q_right = gl.allocate_shared_memory(KIND, [1, 64, 256], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, R], SHARED)
    k_left = gl.allocate_shared_memory(KIND, [2, 64, 256], SHARED)
    k_right = gl.allocate_shared_memory(KIND, [2, 64, 256], SHARED)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, R], SHARED)
    k_scale = gl.allocate_shared_memory(gl.float32, [6, 64], LINE)  # and logarithms, inverses
    p_shared = gl.allocate_shared_memory(KIND, [1, 64, 64], SHARED)
    m_shared = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)  # in the end l_i
    MB: gl.constexpr = mbarrier.MBarrierLayout()
    COLUMNS: gl.constexpr = 256 if E4M3 else PIECE
    PIECES: gl.constexpr = 256 // COLUMNS  # of half a block, that are waited for
    left_full = gl.allocate_shared_memory(gl.int64, [2 * PIECES, 1], MB)
    right_full = gl.allocate_shared_memory(gl.int64, [2 * PIECES, 1], MB)
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], MB)
    both = gl.allocate_shared_memory(gl.int64, [1], MB)
    for i in gl.static_range(2 * PIECES):
        mbarrier.init(left_full.index(i), count=2 if E4M3 else 1)
        mbarrier.init(right_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(both, count=2)

    CONSUMER: gl.constexpr = CONSUMER_REGISTERS_E4M3 if E4M3 else CONSUMER_REGISTERS
    gl.warp_specialize(
        [
            (
                dequantize_producer if E4M3 else producer,
                (
                    latent,
                    rope,
                    scale_ptr,
                    table_ptr,
                    table_stride,
                    length_ptr,
                    B,
                    S,
                    total_splits,
                    k_left,
                    k_right,
                    k_rope,
                    k_scale,
                    left_full,
                    right_full,
                    left_empty,
                    right_empty,
                    COLUMNS,
                    L,
                    PAGE,
                    SPLIT,
                    BATCH,
                ),
            ),
            (
                consumer_left,
                (
                    q_ptr,
                    q_rope_ptr,
                    length_ptr,
                    out_ptr,
                    stats_ptr,
                    inner,
                    outer,
                    B,
                    S,
                    NH,
                    total_splits,
                    q_b,
                    q_s,
                    q_h,
                    qr_b,
                    qr_s,
                    qr_h,
                    q_left,
                    q_right,
                    q_rope,
                    k_left,
                    k_right,
                    k_rope,
                    k_scale,
                    p_shared,
                    m_shared,
                    left_full,
                    right_full,
                    left_empty,
                    right_empty,
                    ready,
                    both,
                    COLUMNS,
                    L,
                    MULTI_TOKEN,
                    SOFTCAP,
                    SPLIT,
                    BATCH,
                    E4M3,
                ),
            ),
            (
                consumer_right,
                (
                    q_ptr,
                    q_rope_ptr,
                    length_ptr,
                    out_ptr,
                    stats_ptr,
                    inner,
                    outer,
                    B,
                    S,
                    NH,
                    total_splits,
                    q_b,
                    q_s,
                    q_h,
                    qr_b,
                    qr_s,
                    qr_h,
                    q_left,
                    q_right,
                    q_rope,
                    k_left,
                    k_right,
                    k_rope,
                    k_scale,
                    p_shared,
                    m_shared,
                    left_full,
                    right_full,
                    left_empty,
                    right_empty,
                    ready,
                    both,
                    COLUMNS,
                    L,
                    MULTI_TOKEN,
                    SOFTCAP,
                    SPLIT,
                    BATCH,
                    E4M3,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER, CONSUMER],
    )


def rows_of(pages: torch.Tensor, width: int) -> Any:
    """A cache [P, page, N] for the tensor memory accelerator: its rows, ``width`` columns a time.

    A copy is of 64 rows, or of a page if that has fewer.
    """
    P, page, N = pages.shape
    return TensorDescriptor(pages, [P * page, N], [N, 1], [min(page, 64), width], SHARED.value)
