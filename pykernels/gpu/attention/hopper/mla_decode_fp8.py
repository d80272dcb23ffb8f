"""What is different for an E4M3 cache in ``mla_decode_hopper``: latents arrive as float16.

The tensor cores take both operands in one type, so a warpgroup (``decoded``) takes the place of the
one warp of copies: it loads bytes, makes them float16, which is exact, and stores them where the
tensor memory accelerator would have put bf16. Each value is decoded once, beside the products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_compat import barrier, tma_load
from .mla_decode_loads import share, zeros_behind

QUARTER = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 128 columns
KEY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def half_queries(x, tops, both, SIDE: gl.constexpr):
    """(queries [64, 256], half of their columns, as float16 of at most 2 ** 15, powers of two).

    The powers [64] make them the queries again: ``attention_parts.rows_in_half``. The largest value
    of a row may be the other warpgroup's, which both of them wait for.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    tops.index(SIDE).store(gl.max(gl.abs(x.to(gl.float32)), 1))
    barrier()
    mbarrier.arrive(both, count=1)
    mbarrier.wait(both, 0)
    top = gl.maximum(tops.index(0).load(ROW), tops.index(1).load(ROW))
    power = gl.maximum(top.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (14 << 23)
    inverse = ((254 << 23) - power).to(gl.float32, bitcast=True)
    half = (x.to(gl.float32) * inverse[:, None]).to(gl.float16)
    return half, power.to(gl.float32, bitcast=True)


@gluon.jit
def scaled_softmax(
    s, k_scale, turn, start, end, last, m, total, inner, outer,
    MASKED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """One block of ``attention_parts.scaled_step``; the shares have the values' scales in them."""
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    if SOFTCAP:
        s = 1 - 2 / (gl.exp2(s * inner) + 1)
        factor = outer
    else:
        factor = inner
    s = s * factor + k_scale.index(2 + turn).load(KEYS)[None, :]
    if MASKED:
        at = start + gl.arange(0, 64, layout=KEYS)
        seen = (at < end)[None, :] & (at[None, :] <= last[:, None])
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    base = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s - base[:, None])
    alpha = gl.exp2(m - base)
    inverse = k_scale.index(4 + turn).load(KEYS)
    return p.to(gl.float16), alpha, top, total * alpha + gl.sum(p * inverse[None, :], 1)


@gluon.jit
def _halves(x):
    """E4M3 bytes as float16: exact, an instruction for two."""
    return gl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
        "=r,=r,r", [x], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _ask(latent, row, L: gl.constexpr):
    """Asks for 64 rows of latents to be brought to the L2 cache: one piece of memory."""
    at = latent + row * L + gl.arange(0, 128, layout=KEY) * (64 * L // 128)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;",
        "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def decoded(
    latent, rope, scale, table_ptr, table_stride, length_ptr, B, S, slots, k_left, k_right, k_rope,
    k_scale, left_full, right_full, left_empty, right_empty,
    COLUMNS: gl.constexpr, L: gl.constexpr, PAGE: gl.constexpr, SPLIT: gl.constexpr,
    BATCH: gl.constexpr,
):  # fmt: skip
    """The keys' way into shared memory; a block is within a page.

    A half block is on its way here while its place is still in use, the next block to the L2 cache.
    With a block come its keys' scales, their logarithms and inverses, one thread each; behind the
    end there are zeros, since what lies there may be NaN.
    """
    gdc_wait()
    gdc_launch_dependents()
    b, _, begin, end, blocks = share(length_ptr, B, S, slots, SPLIT, BATCH)
    table = table_ptr + b * table_stride
    n = gl.arange(0, 64, layout=KEY)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, QUARTER)).to(gl.int64)[:, None] * L
    at += gl.arange(0, 128, layout=gl.SliceLayout(0, QUARTER))[None, :]
    page = gl.load(table + begin // PAGE, mask=blocks > 0, other=0).to(gl.int64)
    for i in range(blocks):
        turn, phase = i & 1, (i >> 1) & 1
        start = begin + i * 64
        row = page * PAGE + start % PAGE
        # Not carried from one turn to the next, which would take a register for each byte.
        x = gl.load(latent + row * L + at)
        y = gl.load(latent + row * L + at + 128)
        factor = gl.load(scale + row + gl.minimum(n, end - 1 - start))
        following = gl.minimum(start + 64, end - 1)
        page = gl.load(table + following // PAGE).to(gl.int64)
        _ask(latent, page * PAGE + following % PAGE // 64 * 64, L)

        full = left_full.index(turn)
        mbarrier.wait(left_empty.index(turn), phase ^ 1)
        mbarrier.expect(full, 64 * 64 * 2)
        tma_load(rope, [row.to(gl.int32), 0], full, k_rope.index(turn))
        k_scale.index(turn).store(factor)
        factor = gl.maximum(factor, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
        k_scale.index(2 + turn).store(gl.log2(factor))
        k_scale.index(4 + turn).store(1 / factor)
        k_left.index(turn).slice(0, 128, dim=1).store(_halves(x))
        k_left.index(turn).slice(128, 128, dim=1).store(_halves(y))
        if start + 64 > end:
            barrier()
            zeros_behind(k_left.index(turn), end - start)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full, count=1)

        x = gl.load(latent + row * L + at + 256)
        y = gl.load(latent + row * L + at + 384)
        full = right_full.index(turn)
        mbarrier.wait(right_empty.index(turn), phase ^ 1)
        k_right.index(turn).slice(0, 128, dim=1).store(_halves(x))
        k_right.index(turn).slice(128, 128, dim=1).store(_halves(y))
        if start + 64 > end:
            barrier()
            zeros_behind(k_right.index(turn), end - start)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full, count=1)
