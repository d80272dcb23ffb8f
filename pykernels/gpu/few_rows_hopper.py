"""Up to 16 rows times a matrix of int4, int8 or E4M3 weights, weights by the memory accelerator.

The products of ``few_rows``, with another way for the weights: a ring in shared memory, filled
by the tensor memory accelerator many steps ahead of the products. What is under way is no lane's
register, so tens of KiB an SM are asked for from the first moment to the last, and a program may
have more rows, which share the work of bringing inputs into the codes' order. Before anything is
read a program asks for all its weights to come to L2: that much of them is on its way while the
launch in front is still running.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .few_rows import KINDS, layouts, left, load_inputs, load_scales, right
from .gluon_names import barrier, tma_load
from .matrices import Matrices, scale_words
from .plan import FewHopperPlan
from .register_words import MAGIC, powers


def takes(stack: Matrices) -> bool:
    """Whether these weights' rows are where the tensor memory accelerator can begin."""
    return stack.kind in KINDS and stack.data.data_ptr() % 16 == 0


def tile_layout(lane: int, warps: int, rows: int) -> object:
    """[rows, 4 lane warps] words of a tile, each warp its columns: ``few_rows.layouts``' words."""
    return gl.DistributedLinearLayout(
        [[0, a] for a in powers(1, lane)] + [[row, 0] for row in powers(8, rows)],
        [[0, lane], [0, 2 * lane], [1, 0], [2, 0], [4, 0]],
        [[0, 4 * lane * part] for part in powers(1, warps)],
        [],
        [rows, 4 * lane * warps],
    )


def rows_layout(warps: int, rows: int) -> object:
    """[rows], dealt out to the warps."""
    own = rows // warps
    lanes = [[1 << i if 1 << i < own else 0] for i in range(5)]
    more = [[row] for row in powers(32, own)]
    return gl.DistributedLinearLayout(
        more, lanes, [[own * p] for p in powers(1, warps)], [], [rows]
    )


@gluon.jit
def prefetch_rows(w, n0, N, WORDS, FIRST, ROWS: gl.constexpr, LP: gl.constexpr):
    """Asks for the first FIRST words of rows n0 .. n0 + ROWS - 1 to come to L2."""
    n = gl.minimum(n0 + gl.arange(0, ROWS, layout=LP), N - 1)
    size = gl.minimum(FIRST, WORDS) * 4 + gl.zeros_like(n)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [(w + n.to(gl.int64) * WORDS).to(gl.int64), size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "MAGIC"])
def few_rows_hopper(
    x, w, w_at, w_scale, out, bias, M, N, K, WORDS, MAGIC,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, PREFETCH: gl.constexpr,
    S: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, LANE: gl.constexpr,
    STAGES: gl.constexpr, LX: gl.constexpr, LT: gl.constexpr, LP: gl.constexpr,
    WS: gl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] * w[n, k]: one program ROWS rows of w, all of K.

    Of a tile each of the S warps takes 4 LANE words of every row.

    Args:
        x: bfloat16 [M, K], M <= COLS.
        w: descriptor of int32 [N, WORDS] in tiles [ROWS, 4 LANE S].
        w_at: its first word.
        w_scale: int32 (see ``matrices``) or, for fp8, float32.
        GROUP: inputs of one scale; 0: one scale an output.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PER: gl.constexpr = 8 if KIND == "int4" else 4
    HALVES: gl.constexpr = 2 if KIND == "int4" else 1
    KC: gl.constexpr = 4 * LANE * PER  # inputs of a warp's part of a tile
    WIDTH: gl.constexpr = 4 * LANE * S
    n0 = gl.program_id(0) * ROWS
    if PREFETCH > 0:
        FIRST = WORDS if PREFETCH == 1 else STAGES * WIDTH
        prefetch_rows(w_at, n0, N, WORDS, FIRST, ROWS, LP)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WIDTH], WS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for q in gl.static_range(STAGES):
        mbarrier.init(ready.index(q), count=1)
    for q in gl.static_range(STAGES):
        mbarrier.expect(ready.index(q), ROWS * WIDTH * 4)
    barrier()
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LX)))
    m = gl.minimum(gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX))), M - 1)
    kx = gl.arange(0, 16 * LANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX)))
    if KIND == "int4":
        kx = kx // 32 * 64 + kx % 32
    at_x = s[:, None, None] * KC + kx[None, None, :]
    xs = x + m[None, :, None] * K + at_x
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    n = gl.minimum(n0 + n, N - 1)
    chunk = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    if KIND == "fp8":
        scales = w_scale + (n // 128 * gl.cdiv(K, 128))[None, :]
    else:
        scales = w_scale + n[None, :]
    zero = gl.full([S, ROWS, COLS], 0.0, gl.float32, layout=MMA)
    acc = zero
    gdc_launch_dependents()
    gdc_wait()
    tiles = gl.cdiv(WORDS, WIDTH)
    for q in gl.static_range(STAGES):
        if q < tiles:
            tma_load(w, [n0, q * WIDTH], ready.index(q), words.index(q))
    scale = load_scales(scales, chunk, N, K, 1, KC, GROUP, KIND)
    inputs = load_inputs(xs, at_x, K, 0, 1, HALVES, KC)
    for tile in range(0, tiles):
        place = tile % STAGES
        mbarrier.wait(ready.index(place), tile // STAGES & 1)
        found = words.index(place).load(LT)
        barrier()  # all have read it
        if tile + STAGES < tiles:
            mbarrier.expect(ready.index(place), ROWS * WIDTH * 4)
            column = (tile + STAGES) * WIDTH
            tma_load(w, [n0, column], ready.index(place), words.index(place))
        # Behind the fence that comes with a copy, or it would wait for them.
        scale_now = scale
        inputs_now = inputs
        chunk += S
        scale = load_scales(scales, chunk, N, K, 1, KC, GROUP, KIND)
        inputs = load_inputs(xs, at_x, K, (tile + 1) * (S * KC), 1, HALVES, KC)
        found = found.reshape([ROWS, S, 4 * LANE]).permute([1, 0, 2])
        part = zero
        for h in gl.static_range(HALVES):
            b = right(inputs_now[h], B)
            a = left(found >> (4 * h), MAGIC, KIND, A)
            if GROUP == 0:
                acc = mma_v2(a, b, acc)
            elif GROUP == 32:
                sc = scale_now[0]
                if KIND == "int4":
                    sc = sc & -65536 if h == 1 else sc << 16
                else:
                    odd = (chunk - S) % 2 == 1
                    sc = gl.where(odd[:, None], sc & -65536, sc << 16)
                acc += mma_v2(a, b, zero) * sc.to(gl.float32, bitcast=True)[:, :, None]
            else:
                part = mma_v2(a, b, part)
        if GROUP > 32:
            sc = scale_now[0]
            acc += part * (sc if KIND == "fp8" else sc.to(gl.float32, bitcast=True))[:, :, None]
    value = gl.sum(acc, axis=0)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, S], [0, 1])
    value = gl.convert_layout(value, OUT)
    no = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    mo = gl.arange(0, COLS, layout=gl.SliceLayout(0, OUT))
    if GROUP == 0:
        sc = gl.load(w_scale + no, mask=no < N, other=0)
        value *= sc.to(gl.float32, bitcast=True)[:, None]
    if HAS_BIAS:
        value += gl.load(bias + no, mask=no < N, other=0.0).to(gl.float32)[:, None]
    to = out + mo[None, :] * N + no[:, None]
    gl.store(to, value.to(gl.bfloat16), mask=(no < N)[:, None] & (mo < M)[None, :])


def multiply_few_rows_hopper(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: FewHopperPlan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes and dtypes, and asked ``takes``.

    Args:
        x: bfloat16 [M, K], M from 1 to 64.
        stack: one matrix.
        out: bfloat16 [M, N].
    """
    words = stack.data[0].view(torch.int32)
    lane = 2 if stack.group == 32 else 4
    cols = max(8, triton.next_power_of_2(x.shape[0]))
    _, inputs_layout = layouts(lane, plan.warps, plan.rows, cols)
    shared = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    tile = [plan.rows, 4 * lane * plan.warps]
    few_rows_hopper[(triton.cdiv(stack.N, plan.rows),)](
        x,
        TensorDescriptor.from_tensor(words, tile, shared),
        words,
        scale_words(stack),
        out,
        bias,
        x.shape[0],
        stack.N,
        stack.K,
        words.shape[1],
        MAGIC,
        KIND=stack.kind,
        GROUP=0 if stack.group == stack.K and stack.kind != "fp8" else stack.group,
        HAS_BIAS=bias is not None,
        PREFETCH=plan.prefetch,
        S=plan.warps,
        ROWS=plan.rows,
        COLS=cols,
        LANE=lane,
        STAGES=plan.stages,
        LX=inputs_layout,
        LT=tile_layout(lane, plan.warps, plan.rows),
        LP=rows_layout(plan.warps, plan.rows),
        WS=shared,
        num_warps=plan.warps,
        launch_pdl=True,
    )
