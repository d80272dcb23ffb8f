"""MLA decode of E4M3 latents for few heads, in lanes that multiply what they load.

The function of ``mla_decode``'s Triton kernel for latents of 512 and 64, by ``attention_lanes``.
Each of four warps has a quarter of the latents' columns: of the scores' sums, which are added up in
shared memory, and of the values. All read the same keys, so a block is asked for twice, as key and
as value in other lanes, the second time from the L1 cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_lanes import (
    first_rows,
    in_half,
    joined,
    key_words,
    left_keys,
    left_values,
    log2,
    pages_of,
    right_queries,
    right_shares,
    value_words,
)
from .gluon_names import barrier
from .gluon_share import ask_for, share_of_slot
from .register_words import powers

WARPS = 4
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


def rope_layout(keys: int) -> object:
    """int32 of rotated keys [WARPS, keys, 8], a quarter of the columns a warp."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *([0, n, 0] for n in powers(8, keys))],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [WARPS, keys, 8],
    )


def sums_layout(keys: int, rows: int) -> object:
    """[WARPS, keys, rows] as scores lie, but each warp has those of all."""
    return gl.DistributedLinearLayout(
        [[0, 0, n] for n in (1, *powers(8, rows))]
        + [[0, n, 0] for n in powers(8, keys)]
        + [[1, 0, 0], [2, 0, 0]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 0], [0, 0, 0]],
        [],
        [WARPS, keys, rows],
    )


@gluon.jit
def _left_rope(words, A: gl.constexpr):
    """[W, N, 8] words of bf16 -> [W, N, 16] in the order of ``_right_rope``."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    x = joined(words, False).reshape([W, N, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(x.reshape([W, N, 16]), A)


@gluon.jit
def _right_rope(q, B: gl.constexpr):
    """[W, ROWS, 16] -> [W, 16, ROWS]."""
    W: gl.constexpr = q.shape[0]
    ROWS: gl.constexpr = q.shape[1]
    x = q.reshape([W, ROWS, 4, 2, 2]).permute([0, 3, 2, 4, 1])
    return gl.convert_layout(x.reshape([W, 16, ROWS]), B)


@gluon.jit
def _queries(base, first, rows, NH, s_stride, h_stride, ROWS: gl.constexpr, N: gl.constexpr):
    """[4, ROWS, N] columns of the query rows, zeros behind the last."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // N, N // 8], [4, 1, 1], [2, 1, 0])
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    c = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = (row // NH).to(gl.int64) * s_stride + row % NH * h_stride
    inside = (row < rows)[None, :, None] & (w + c >= 0)
    return gl.load(base + at[None, :, None] + w * N + c, mask=inside, other=0.0)


@gluon.jit(do_not_specialize=["B", "slots", "table_stride"])  # a batch compiles nothing new
def mla_decode_lanes(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, scale_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    inner, outer, B, S, NH, slots, table_stride,
    q_b, q_s, q_h, qr_b, qr_s, qr_h,
    PAGE: gl.constexpr, L: gl.constexpr, R: gl.constexpr, SOFTCAP: gl.constexpr,
    SPLIT: gl.constexpr, BATCH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    MANY: gl.constexpr, EARLY: gl.constexpr,
    LK: gl.constexpr, LV: gl.constexpr, LR: gl.constexpr, LS: gl.constexpr,
):  # fmt: skip
    """One program: a part of a sequence's keys, for ROWS (8 or 16) query rows.

    Args:
        latent_ptr, rope_ptr: int32 [P, PAGE, 128] and [P, PAGE, 32]; PAGE is a multiple of KEYS.
        MANY: more than one new token.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ALL: gl.constexpr = gl.SliceLayout(0, MMA)  # [KEYS, ROWS], the same in each warp
    ROW: gl.constexpr = gl.SliceLayout(0, ALL)
    KEY: gl.constexpr = gl.SliceLayout(1, ALL)
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    if EARLY:
        ask_for(table_ptr, length_ptr, B, table_stride, 4)
        gdc_wait()  # for what the kernel before this one wrote
        gdc_launch_dependents()  # the combining kernel waits by itself
    slot = gl.program_id(1)
    b, part, parts = slot, 0, 1
    if SPLIT:
        b, length, part, parts = share_of_slot(
            length_ptr, slot, B, slots, S, 0, KEYS, BATCH, 4, False
        )
    else:
        length = gl.load(length_ptr + b)
    each = gl.cdiv(gl.cdiv(length, KEYS), gl.maximum(parts, 1)) * KEYS
    begin = part * each
    end = gl.minimum(length, begin + each)
    first, rows = gl.program_id(0) * ROWS, S * NH
    if SPLIT:
        end = gl.where(parts > 0, end, begin)  # a slot of no sequence does nothing
    b = b.to(gl.int64)
    table = table_ptr + b * table_stride

    wk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LK)))
    wv = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LV)))
    wr = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LR)))
    nk = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LK)))
    nv = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LV)))
    nr = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LR)))
    ns = gl.arange(0, KEYS, layout=KEY)
    ik = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LK)))
    iv = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LV)))
    ir = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LR)))
    k_at = latent_ptr + wk[:, None, None] * 32 + nk[None, :, None] * 128 + ik[None, None, :]
    v_at = latent_ptr + wv[:, None, None] * 32 + nv[None, :, None] * 128 + iv[None, None, :]
    r_at = rope_ptr + wr[:, None, None] * 8 + nr[None, :, None] * 32 + ir[None, None, :]
    s_at = scale_ptr + ns
    zk, zv, zr, zs = wk * 0, wv * 0, wr * 0, ns * 0  # all warps have the same keys

    pk = pages_of(table, begin, end, zk, KEYS, PAGE)
    pv = pages_of(table, begin, end, zv, KEYS, PAGE)
    pr = pages_of(table, begin, end, zr, KEYS, PAGE)
    ps = pages_of(table, begin, end, zs, KEYS, PAGE)
    k_words = key_words(k_at, pk, begin, zk, 128, KEYS, PAGE)
    r_words = key_words(r_at, pr, begin, zr, 32, KEYS, PAGE)
    v_words = value_words(v_at, pv, begin, end, zv, nv, 128, KEYS, PAGE)
    k_scale = gl.load(
        s_at + first_rows(ps, begin, zs, KEYS, PAGE), mask=begin + ns < end, other=1.0
    )
    pk = pages_of(table, begin + KEYS, end, zk, KEYS, PAGE)
    pv = pages_of(table, begin + KEYS, end, zv, KEYS, PAGE)
    pr = pages_of(table, begin + KEYS, end, zr, KEYS, PAGE)
    ps = pages_of(table, begin + KEYS, end, zs, KEYS, PAGE)

    q, q_factor = in_half(_queries(q_ptr + b * q_b, first, rows, NH, q_s, q_h, ROWS, 128))
    q = right_queries(q, RIGHT, True)
    q_factor = gl.convert_layout(q_factor, gl.SliceLayout(1, MMA))[:, None, :]
    q_rope = _queries(q_rope_ptr + b * qr_b, first, rows, NH, qr_s, qr_h, ROWS, 16)
    q_rope = _right_rope(q_rope, RIGHT)
    # Newest key that a row sees.
    last = length - S + (first + gl.arange(0, ROWS, layout=ROW)) // NH
    factor = outer if SOFTCAP else inner

    sums = gl.allocate_shared_memory(gl.float32, [2, 4, KEYS, ROWS], PLAIN)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([ROWS], 0.0, gl.float32, layout=ROW)
    acc = gl.full([4, 128, ROWS], 0.0, gl.float32, layout=MMA)
    zero = gl.full([4, KEYS, ROWS], 0.0, gl.float32, layout=MMA)
    each_warp = gl.full([4, KEYS, ROWS], 0.0, gl.float16, layout=RIGHT)
    for start in range(begin, end, KEYS):
        after = start + KEYS
        k = left_keys(k_words, LEFT, True)
        k_words = key_words(k_at, pk, after, zk, 128, KEYS, PAGE)
        pk = pages_of(table, after + KEYS, end, zk, KEYS, PAGE)
        k_rope = _left_rope(r_words, LEFT)
        r_words = key_words(r_at, pr, after, zr, 32, KEYS, PAGE)
        pr = pages_of(table, after + KEYS, end, zr, KEYS, PAGE)
        scale = k_scale
        k_scale = gl.load(
            s_at + first_rows(ps, after, zs, KEYS, PAGE), mask=after + ns < end, other=1.0
        )
        ps = pages_of(table, after + KEYS, end, zs, KEYS, PAGE)
        part_s = mma_v2(k, q, zero) * (scale[:, None][None, :, :] * q_factor)
        part_s = mma_v2(k_rope, q_rope, part_s)  # which is not scaled
        turn = sums.index(start // KEYS % 2)
        turn.store(part_s)
        barrier()
        s = gl.convert_layout(gl.sum(turn.load(LS), 0), ALL)
        # As in ``attention_parts.scaled_step``: the values' factors are in the shares.
        if SOFTCAP:
            s = 1 - 2 / (gl.exp2(s * inner) + 1)
        scale = gl.maximum(scale, 7.888609052210118e-31)  # 2 ** -100: a row of zeros has any
        s = s * factor + log2(scale)[:, None]
        seen = (start + ns < end)[:, None]
        if MANY:
            seen = seen & ((start + ns)[:, None] <= last[None, :])
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 0))
        base = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        p = gl.exp2(s - base[None, :])
        alpha = gl.exp2(m - base)
        m = top
        total = total * alpha + gl.sum(p * (1 / scale)[:, None], 0)
        v = left_values(v_words, LEFT, True)
        v_words = value_words(v_at, pv, after, end, zv, nv, 128, KEYS, PAGE)
        pv = pages_of(table, after + KEYS, end, zv, KEYS, PAGE)
        p = right_shares(p[None, :, :], RIGHT, True)
        p, _ = gl.broadcast(p, each_warp)
        acc = mma_v2(v, p, acc * alpha[None, :][None, :, :])

    acc = acc / gl.where(total == 0, 1.0, total)[None, :][None, :, :]
    x = acc.reshape([4, 16, 8, ROWS]).permute([3, 0, 2, 1]).reshape([ROWS, 512])
    x = gl.convert_layout(x, OUT)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    c = gl.arange(0, 512, layout=gl.SliceLayout(0, OUT))
    o_at = slot.to(gl.int64) * rows + row  # not split: slots are sequences
    to = out_ptr + o_at[:, None] * 512 + c[None, :]
    if SPLIT:
        z = gl.where(total == 0, float("-inf"), m + gl.log2(gl.where(total == 0, 1.0, total)))
        z = gl.convert_layout(z, gl.SliceLayout(1, OUT))
        there = gl.where(parts > 0, rows, 0)
        gl.store(lse_ptr + o_at, z, mask=row < there)
        there = gl.where(begin < end, there, 0)
        gl.store(to, x, mask=(row < there)[:, None])
    else:
        gl.store(to, x.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None])
