"""What an E4M3 cache changes in ``mla_decode_hopper``: latents are dequantized to float16.

The tensor cores take both operands in one type, so a producer warpgroup (``dequantize_producer``)
takes the place of the one warp of copies: it loads bytes, makes them float16, which is exact, and
stores them where the tensor memory accelerator would have put bf16. Each value is dequantized once,
in parallel with the products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_compat import barrier, tma_load
from ..online_softmax import capped, half_scale
from .mla_decode_loads import split_of_cta, zeros_behind

QUARTER = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 128 columns
KEY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def half_queries(x, m_shared, both, SIDE: gl.constexpr):
    """(queries [64, 256], half of their columns, as float16 of at most 2 ** 15, powers of two).

    The powers [64] make them the queries again: ``online_softmax.half_rows``. The largest value
    of a row may be the other warpgroup's, which both of them wait for.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    m_shared.index(SIDE).store(gl.max(gl.abs(x.to(gl.float32)), 1))
    barrier()
    mbarrier.arrive(both, count=1)
    mbarrier.wait(both, 0)
    amax = gl.maximum(m_shared.index(0).load(ROW), m_shared.index(1).load(ROW))
    power, inverse = half_scale(amax)
    return (x.to(gl.float32) * inverse[:, None]).to(gl.float16), power


@gluon.jit
def scaled_softmax(
    s,
    k_scale,
    stage,
    start,
    end,
    last,
    m_i,
    l_i,
    inner,
    outer,
    MASKED: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """``online_softmax.softmax_step_scaled``, with the scales' logarithms and inverses at hand."""
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    if SOFTCAP:
        s = capped(s, inner)
        factor = outer
    else:
        factor = inner
    s = s * factor + k_scale.index(2 + stage).load(KEYS)[None, :]
    if MASKED:
        at = start + gl.arange(0, 64, layout=KEYS)
        mask = (at < end)[None, :] & (at[None, :] <= last[:, None])
        s = gl.where(mask, s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - base[:, None])
    alpha = gl.exp2(m_i - base)
    inverse = k_scale.index(4 + stage).load(KEYS)
    return p.to(gl.float16), alpha, m_new, l_i * alpha + gl.sum(p * inverse[None, :], 1)


@gluon.jit
def _e4m3_to_half(x):
    """E4M3 bytes as float16: exact, an instruction for two."""
    return gl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
        "=r,=r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _prefetch_l2(latent, row, L: gl.constexpr):
    """Prefetches 64 rows of latents, one piece of memory, into the L2 cache."""
    at = latent + row * L + gl.arange(0, 128, layout=KEY) * (64 * L // 128)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;",
        "=r,l",
        [at.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def dequantize_producer(
    latent,
    rope,
    scale,
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
    COLUMNS: gl.constexpr,
    L: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    BATCH: gl.constexpr,
):
    """Brings the keys into shared memory, dequantized; a block is within a page.

    Half a block is loaded while its buffer is still in use, and the next block prefetched into L2.
    With a block come its keys' scales, their logarithms and inverses, one thread each; behind the
    end there are zeros, since what lies there may be NaN.
    """
    gdc_wait()
    gdc_launch_dependents()
    b, _, begin, end, blocks = split_of_cta(length_ptr, B, S, total_splits, SPLIT, BATCH)
    table = table_ptr + b * table_stride
    n = gl.arange(0, 64, layout=KEY)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, QUARTER)).to(gl.int64)[:, None] * L
    at += gl.arange(0, 128, layout=gl.SliceLayout(0, QUARTER))[None, :]
    page = gl.load(table + begin // PAGE, mask=blocks > 0, other=0).to(gl.int64)
    for i in range(blocks):
        stage, phase = i & 1, (i >> 1) & 1
        start = begin + i * 64
        row = page * PAGE + start % PAGE
        # Not carried from one stage to the next, which would take a register for each byte.
        x = gl.load(latent + row * L + at)
        y = gl.load(latent + row * L + at + 128)
        factor = gl.load(scale + row + gl.minimum(n, end - 1 - start))
        following = gl.minimum(start + 64, end - 1)
        page = gl.load(table + following // PAGE).to(gl.int64)
        _prefetch_l2(latent, page * PAGE + following % PAGE // 64 * 64, L)

        full = left_full.index(stage)
        mbarrier.wait(left_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, 64 * 64 * 2)
        tma_load(rope, [row.to(gl.int32), 0], full, k_rope.index(stage))
        k_scale.index(stage).store(factor)
        factor = gl.maximum(factor, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
        k_scale.index(2 + stage).store(gl.log2(factor))
        k_scale.index(4 + stage).store(1 / factor)
        k_left.index(stage).slice(0, 128, dim=1).store(_e4m3_to_half(x))
        k_left.index(stage).slice(128, 128, dim=1).store(_e4m3_to_half(y))
        if start + 64 > end:
            barrier()
            zeros_behind(k_left.index(stage), end - start)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full, count=1)

        x = gl.load(latent + row * L + at + 256)
        y = gl.load(latent + row * L + at + 384)
        full = right_full.index(stage)
        mbarrier.wait(right_empty.index(stage), phase ^ 1)
        k_right.index(stage).slice(0, 128, dim=1).store(_e4m3_to_half(x))
        k_right.index(stage).slice(128, 128, dim=1).store(_e4m3_to_half(y))
        if start + 64 > end:
            barrier()
            zeros_behind(k_right.index(stage), end - start)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full, count=1)
