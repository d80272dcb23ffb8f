"""Linears of int4 and int8 weights for some fifty rows and more, written out for Hopper.

The transposed tile: a warpgroup's left operand are weights in registers, decoded (see
``register_words``) while the tensor cores still multiply the 64 inputs before. Words and inputs
come by the tensor memory accelerator, several steps ahead. A lane of the product decodes whole
words, so it has inputs in another order than they lie in: ``in_lane_order`` gives x that order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_names import barrier, tma_load
from .matrices import Matrices, scale_words
from .plan import ManyPlan
from .register_words import MAGIC, codes, powers

KINDS = ("int4", "int8")


def takes(stack: Matrices) -> bool:
    """Whether these weights can be multiplied: a step has one scale a row."""
    return (
        stack.kind in KINDS
        and stack.group in (128, stack.K)
        and stack.data.data_ptr() % 16 == 0
    )  # fmt: skip


@triton.jit
def lane_order(x, out, M, K, K_OUT, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, p] = the input of place p, zeros behind K.

    Of 64 places, lane t of four has 16 j + 8 odd + 2 t + e, and words 4 t .. 4 t + 3; the codes of
    word j are its bytes 2 e + odd. Of an int4 word the second 64 places have the high halves.
    """
    m = tl.program_id(0)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    STEP: tl.constexpr = 128 if KIND == "int4" else 64
    byte = 16 * (p // 2 % 4) + 4 * (p // 16 % 4) + 2 * (p % 2) + p // 8 % 2
    if KIND == "int4":
        k = p // STEP * STEP + byte // 32 * 64 + byte % 32 + p // 64 % 2 * 32
    else:
        k = p // STEP * STEP + byte
    value = tl.load(x + m.to(tl.int64) * K + k, mask=k < K, other=0.0)
    tl.store(out + m.to(tl.int64) * K_OUT + p, value, mask=p < K_OUT)


def in_lane_order(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x [M, K] as the products want it: [M, K up to whole steps of 128]."""
    M, K = x.shape
    out = torch.empty(M, -(-K // 128) * 128, dtype=x.dtype, device=x.device)
    block = 1024
    grid = (M, triton.cdiv(out.shape[1], block))  # M may be more than the other axes hold
    lane_order[grid](x, out, M, K, out.shape[1], KIND=kind, BLOCK=block)
    return out


def words_layout(warps: int) -> object:
    """[16 warps, 16] words: lane 4 g + t has words 4 t .. 4 t + 3 of rows g and g + 8."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[row, 0] for row in powers(16, 16 * warps)],
        [],
        [16 * warps, 16],
    )


@gluon.jit
def operand(words, scale, MAGIC, KIND: gl.constexpr, SCALED: gl.constexpr, A: gl.constexpr):
    """[ROWS, 16] words (int4: their bytes' low halves) -> [ROWS, 64] weights."""
    ROWS: gl.constexpr = words.shape[0]
    v = codes(words, MAGIC, KIND).reshape([ROWS, 4, 4, 2, 2]).permute([0, 2, 4, 1, 3])
    a = gl.convert_layout(v.reshape([ROWS, 64]), A)
    if SCALED:
        a = a * scale.to(gl.float32, bitcast=True).to(gl.bfloat16)[:, None]
    return a


@gluon.jit
def load_scale(scales, c, last, N, GROUP: gl.constexpr):
    """Of step c, each row's; without groups 0."""
    if GROUP > 0:
        return gl.load(scales + gl.minimum(c, last) * N)
    else:
        return 0


@gluon.jit(do_not_specialize=["M", "M_BLOCKS", "MAGIC"])
def many_rows_hopper(
    x, w, w_scale, out, bias, M, N, STEPS, SHARE, M_BLOCKS, MAGIC,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    COLS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr,
    LW: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] * w[n, k], COLS rows of x by 16 WARPS rows of w.

    Program (i, j) adds up steps j * SHARE .. (j + 1) * SHARE - 1 of 128 inputs; with PARTS it
    writes them as they are to ``out`` + j * M * N. A step is two products, so that two sets of
    registers take turns: a copy of one to the other would have to wait for the product.

    Args:
        x: descriptor of bfloat16 [M, STEPS * 128], in the order of lanes.
        w: descriptor of int32 [N, words].
        w_scale: int32, see ``matrices``.
    """
    ROWS: gl.constexpr = 16 * WARPS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TILES: gl.constexpr = 1 if KIND == "int4" else 2  # of words, a step
    SCALED: gl.constexpr = GROUP > 0
    m0 = gl.program_id(0) % M_BLOCKS * COLS
    n0 = gl.program_id(0) // M_BLOCKS * ROWS
    c0 = gl.program_id(1) * SHARE
    count = gl.minimum(SHARE, STEPS - c0)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 64], XS)
    ws = gl.allocate_shared_memory(gl.int32, [WORD_STAGES, ROWS, 16], WS)
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [WORD_STAGES, 1], mbarrier.MBarrierLayout())
    for q in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(q), count=1)
    for q in gl.static_range(WORD_STAGES):
        mbarrier.init(w_ready.index(q), count=1)
    barrier()
    for q in gl.static_range(WORD_STAGES):
        if q < count * TILES:
            mbarrier.expect(w_ready.index(q), ROWS * 64)
            tma_load(w, [n0, (c0 * TILES + q) * 16], w_ready.index(q), ws.index(q))
    for q in gl.static_range(STAGES - 1):
        if q < count * 2:
            mbarrier.expect(x_ready.index(q), COLS * 128)
            tma_load(x, [m0, (c0 * 2 + q) * 64], x_ready.index(q), xs.index(q))
    na = gl.minimum(n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A)), N - 1)
    scales = w_scale + na
    last = c0 + count - 1
    scale = load_scale(scales, c0, last, N, GROUP)
    scale_1 = load_scale(scales, c0 + 1, last, N, GROUP)
    scale_2 = load_scale(scales, c0 + 2, last, N, GROUP)
    acc = gl.full([ROWS, COLS], 0.0, gl.float32, layout=ACC)
    mbarrier.wait(w_ready.index(0), 0)
    words = ws.index(0).load(LW)
    a = operand(words, scale, MAGIC, KIND, SCALED, A)
    before = a
    for c in range(0, count):
        for h in gl.static_range(2):
            i = c * 2 + h
            stage = i % STAGES
            mbarrier.wait(x_ready.index(stage), i // STAGES & 1)
            token = warpgroup_mma(a, xs.index(stage).permute((1, 0)), acc, is_async=True)
            acc, before = warpgroup_mma_wait(1, deps=[token, before])
            barrier()  # all have read the inputs of product i - 1 and the words of this one
            j = i + STAGES - 1
            to = j % STAGES
            if j < count * 2:
                mbarrier.expect(x_ready.index(to), COLS * 128)
                tma_load(x, [m0, (c0 * 2 + j) * 64], x_ready.index(to), xs.index(to))
            if h < TILES:
                tile = c * TILES + h
                place = tile % WORD_STAGES
                if tile + WORD_STAGES < count * TILES:
                    mbarrier.expect(w_ready.index(place), ROWS * 64)
                    column = (c0 * TILES + tile + WORD_STAGES) * 16
                    tma_load(w, [n0, column], w_ready.index(place), ws.index(place))
            before = a
            if h == 1 or TILES == 2:
                ahead = gl.minimum(c * TILES + (h if TILES == 2 else 0) + 1, count * TILES - 1)
                mbarrier.wait(w_ready.index(ahead % WORD_STAGES), ahead // WORD_STAGES & 1)
                words = ws.index(ahead % WORD_STAGES).load(LW)
            if h == 1:
                scale = scale_1
                scale_1 = scale_2
                scale_2 = load_scale(scales, c0 + c + 3, last, N, GROUP)
            if h == 1 or TILES == 2:
                a = operand(words, scale, MAGIC, KIND, SCALED, A)
            else:
                a = operand(words >> 4, scale, MAGIC, KIND, SCALED, A)
    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
    barrier()
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, WARPS], [0, 1])
    n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    m = m0 + gl.arange(0, COLS, layout=gl.SliceLayout(0, OUT))
    to_rows = out + (gl.program_id(1) * M + m).to(gl.int64)[None, :] * N + n[:, None]
    there = (m < M)[None, :] & (n < N)[:, None]
    no = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    if GROUP == 0:
        own = gl.load(w_scale + no, mask=no < N, other=0)
        acc *= own.to(gl.float32, bitcast=True)[:, None]
    if PARTS:
        gl.store(to_rows, gl.convert_layout(acc, OUT), mask=there)
    else:
        if HAS_BIAS:
            acc += gl.load(bias + no, mask=no < N, other=0.0).to(gl.float32)[:, None]
        gl.store(to_rows, gl.convert_layout(acc.to(gl.bfloat16), OUT), mask=there)


def multiply_many_rows(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: ManyPlan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes and dtypes, and asked ``takes``.

    Args:
        x: bfloat16 [M, K].
        stack: one matrix.
        out: bfloat16 [M, N], or float32 [parts, M, N]: of how many parts the sum is to be.
    """
    parts = out.shape[0] if out.ndim == 3 else 1
    M = x.shape[0]
    words = stack.data[0].view(torch.int32)
    steps = triton.cdiv(x.shape[1], 128)
    inputs = in_lane_order(x, stack.kind)
    x_shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    w_shared = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    m_blocks = triton.cdiv(M, plan.cols)
    many_rows_hopper[(m_blocks * triton.cdiv(stack.N, 16 * plan.warps), parts)](
        TensorDescriptor.from_tensor(inputs, [plan.cols, 64], x_shared),
        TensorDescriptor.from_tensor(words, [16 * plan.warps, 16], w_shared),
        scale_words(stack),
        out,
        bias,
        M,
        stack.N,
        steps,
        triton.cdiv(steps, parts),
        m_blocks,
        MAGIC,
        KIND=stack.kind,
        GROUP=0 if stack.group == stack.K else stack.group,
        HAS_BIAS=bias is not None,
        PARTS=out.ndim == 3,
        COLS=plan.cols,
        WARPS=plan.warps,
        STAGES=plan.stages,
        WORD_STAGES=plan.word_stages,
        LW=words_layout(plan.warps),
        XS=x_shared,
        WS=w_shared,
        num_warps=plan.warps,
    )
