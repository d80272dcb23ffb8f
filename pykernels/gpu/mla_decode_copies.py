"""What comes into shared memory for ``mla_decode_hopper``: queries, blocks of keys, shares."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gluon_names import barrier, tma_load

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 columns
THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def query_rows(base, row, rows, NH, s_stride, h_stride, WIDTH: gl.constexpr, MANY: gl.constexpr):
    """64 query rows of ``WIDTH`` columns in registers, zeros behind the last row.

    All of it is asked for at once: it is the first that a program waits for.
    """
    row += gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE))
    if MANY:
        at = base + (row // NH).to(gl.int64) * s_stride + (row % NH) * h_stride
    else:
        at = base + row.to(gl.int64) * h_stride
    return gl.load(at[:, None] + c[None, :], mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def zeros_behind(values, keys):
    """Zeros in the rows of a half block that hold no keys: there may be NaN there."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    for i in gl.static_range(4):
        part = values.slice(i * 64, 64, dim=1)
        x = part.load(TILE)
        part.store(gl.where((n < keys)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()  # the tensor cores read through another path than threads write
    barrier()


@gluon.jit
def _ask(base, row, WIDTH: gl.constexpr):
    """Asks for 64 rows to be brought to the L2 cache: one piece of memory, 16 rows a warp.

    By one thread of it: an instruction that takes its address for a whole warp, and would be
    repeated for each that has another.
    """
    n = gl.arange(0, 128, layout=THREAD)
    at = base + row.to(gl.int64) * WIDTH + n // 32 * (16 * WIDTH)
    size = gl.where(n % 32 == 0, 32 * WIDTH, 0)  # bytes
    gl.inline_asm_elementwise(
        "{.reg .pred some; setp.gt.s32 some, $2, 0;"
        " @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}",
        "=r,l,r", [at.to(gl.int64), size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def copies(
    latent, rope, latent_ptr, rope_ptr, scale, table, begin, end, blocks, k_left, k_right, k_rope,
    k_scale, left_full, right_full, left_empty, right_empty, L: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The keys' way into shared memory: the left half with the rotated part, then the right.

    A half's place is free for a short time only before its next keys are needed, less than memory
    takes to answer. So blocks are asked for into the L2 cache two ahead of their copies.
    """
    PIECE: gl.constexpr = min(PAGE, 64)  # rows of a copy
    last = end - 1
    page = gl.load(table + begin // PAGE, mask=blocks > 0, other=0)
    following = gl.load(table + gl.minimum(begin + 64, last) // PAGE, mask=blocks > 0, other=0)
    for i in range(blocks):
        turn, phase = i & 1, (i >> 1) & 1
        start = begin + i * 64
        here = page
        page = following
        behind = gl.minimum(start + 128, last)
        following = gl.load(table + behind // PAGE)
        full = left_full.index(turn)
        mbarrier.wait(left_empty.index(turn), phase ^ 1)
        mbarrier.expect(full, 64 * (64 + 256) * 2)
        for j in gl.static_range(64 // PIECE):
            if j > 0:  # behind the end the last page again: its shares are zero
                here = gl.load(table + gl.minimum(start + j * PIECE, last) // PAGE)
            row = here * PAGE + (start + j * PIECE) % PAGE
            to = k_rope.index(turn).slice(j * PIECE, PIECE, dim=0)
            tma_load(rope, [row, 0], full, to)
            tma_load(latent, [row, 0], full, k_left.index(turn).slice(j * PIECE, PIECE, dim=0))
        full = right_full.index(turn)
        mbarrier.wait(right_empty.index(turn), phase ^ 1)
        mbarrier.expect(full, 64 * 256 * 2)
        for j in gl.static_range(64 // PIECE):
            if 64 // PIECE > 1:
                here = gl.load(table + gl.minimum(start + j * PIECE, last) // PAGE)
            row = here * PAGE + (start + j * PIECE) % PAGE
            to = k_right.index(turn).slice(j * PIECE, PIECE, dim=0)
            tma_load(latent, [row, 256], full, to)
        if PAGE >= 64:
            row = following * PAGE + behind % PAGE // 64 * 64
            _ask(latent_ptr, row, L)
            _ask(rope_ptr, row, 64)
