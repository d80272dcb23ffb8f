"""Experts of a few tokens each, and K-quants of a few rows, at the rate that memory gives weights.

As in ``skinny_linear``, weights are the left operand of ``mma.sync`` (sm_80 on), loaded straight
into the lane that multiplies and dequantizes them. Where a scale is for 64 inputs or fewer, each of
the four lanes of a quad takes the words of another scale (``segments``), and each has columns of
its own: their inputs are zeros for the other lanes' words. So a product's sums are apart as the
scales are, and a lane unpacks no scale but its own. A gated program has rows of gate and of up.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....shapes import SWIGLU, ExpertSpec, SortedPairs
from ...common.dequant_mma import MAGIC, codes, nibbles_above, sixes_above
from ...common.launch import early_launch, launches_early
from ...plans.gemm import SkinnyExpertsPlan
from ...plans.registers import fine_scales
from ..tiles import activation_of, load_bias, swiglu
from ..weights import Matrices, scale_every, scale_words
from .operands import inputs_layout, left, load_words, right, scales_layout, words_layout
from .scales import load_scales, scales_of, spread

KINDS = ("int4", "int8", "mxfp4", "fp8", "q4_k", "q6_k")


def segments(stack: Matrices) -> int:
    """Scales of a quad's words."""
    return 4 if fine_scales(stack.kind, stack.group) else 1


def lane_words(stack: Matrices) -> int:
    """Words of each row that a lane takes of a chunk: what one scale is for, or 4."""
    return 8 if segments(stack) == 4 and stack.kind != "q6_k" else 4


@gluon.jit
def locate(
    pid,
    starts,
    M,
    N_BLOCKS,
    E,
    E_PADDED: gl.constexpr,
    TOKENS: gl.constexpr,
    S: gl.constexpr,
):
    """(expert, first row, row behind the expert's last, N block): no rows where there is no work.

    Block ``b`` of rows is the one at row b's expert, as many blocks behind its first as row b is
    behind its first row: no expert has more blocks than rows, so nothing need be summed up.
    """
    if E_PADDED == 0:  # all rows of a block of the matrix together, which is in L2 then
        blocks = gl.cdiv(M, TOKENS)
        expert = pid * 0
        first = pid % blocks * TOKENS
        hi = pid * 0 + M
        n_block = pid // blocks
    else:
        b = pid // N_BLOCKS
        n_block = pid % N_BLOCKS
        PER: gl.constexpr = E_PADDED // 32 if E_PADDED > 32 else 1
        ONE: gl.constexpr = gl.BlockedLayout([PER], [32], [S], [0])  # every warp has them all
        e = gl.arange(0, E_PADDED, layout=ONE)
        ends = gl.load(starts + 1 + e, mask=e < E, other=2147483647)
        expert = gl.sum((ends <= b).to(gl.int32), 0)
        lo = gl.max(gl.where(ends <= b, ends, 0), 0)
        hi = gl.min(gl.where(ends <= b, 2147483647, ends), 0)
        first = lo + (b - lo) * TOKENS
        hi = gl.where(expert < E, hi, first)
        expert = gl.minimum(expert, E - 1)
    return expert, first, hi, n_block


@gluon.jit
def load_inputs(
    xs,
    at,
    own,
    K,
    FIRST,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    KC: gl.constexpr,
    HALF: gl.constexpr,
):
    """Inputs of each half of each chunk; zeros for the other segments."""
    inputs = ()
    for i in gl.static_range(PARTS):
        k = (FIRST + i // HALVES * KC + i % HALVES * HALF) // 2
        inputs += (gl.load(xs + k, mask=own & (at < K // 2 - k), other=0),)  # type: ignore[assignment]
    return inputs


@gluon.jit(do_not_specialize=["M", "E", "N_BLOCKS", "MAGIC"])
def skinny_experts(
    x,
    w,
    w_scale,
    w_halves,
    out,
    order,
    starts,
    bias,
    M,
    N,
    K,
    QUADS,
    E,
    TOPK,
    N_BLOCKS,
    MAGIC,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    ACT: gl.constexpr,
    GATHER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    E_PADDED: gl.constexpr,
    PDL: gl.constexpr,
    S: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    SEGMENTS: gl.constexpr,
    LANE: gl.constexpr,
    CHUNKS: gl.constexpr,
    AHEAD: gl.constexpr,
    EVEN: gl.constexpr,
    LW: gl.constexpr,
    LX: gl.constexpr,
    LS: gl.constexpr,
):
    """out[row, n] = sum over k of x[token, k] * w[n, k] + bias[n], of gate and up ``swiglu``.

    Args:
        x: int32, pairs of bfloat16: [tokens, K / 2] with GATHER, otherwise sorted rows.
        w: int32 [matrices, N, 4 QUADS].
        w_scale: int32 (see ``gemm.weights``), for fp8 float32, for q6_k int8 and the data again.
        w_halves: K-quants: the data as float16.
        GROUP: inputs of one scale; 0: one scale an output, or K-quants.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    MATS: gl.constexpr = 2 if GATED else 1
    OWN: gl.constexpr = ROWS // MATS
    TOKENS: gl.constexpr = COLS // SEGMENTS
    SIX: gl.constexpr = KIND == "q6_k"
    FOUR: gl.constexpr = KIND == "q4_k"
    CW: gl.constexpr = 4 * LANE
    HALVES: gl.constexpr = 1 if KIND == "int8" or KIND == "fp8" else 2
    HALF: gl.constexpr = 64 if SIX else 32
    KC: gl.constexpr = CW * 4 * HALVES
    CHUNK_WORDS: gl.constexpr = 36 if FOUR else CW
    STEP: gl.constexpr = S * CHUNKS
    SCALED: gl.constexpr = GROUP > 0 or FOUR or SIX
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, hi, n_block = locate(
        gl.program_id(0), starts, M, N_BLOCKS, E, E_PADDED, TOKENS, S
    )
    if first >= hi:
        return
    WORDS = QUADS * 4
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW)))
    n = gl.minimum(n_block * OWN + r % OWN, N - 1)
    line = (expert * MATS + r // OWN).to(gl.int64) * N + n
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW))) * CHUNKS
    i = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    at_w = s[:, None, None] * CHUNK_WORDS + i[None, None, :]
    lines = w + line[None, :, None] * WORDS
    if FOUR:
        at_w += 4
    rows = lines + at_w
    if SIX:
        at_h = s[:, None, None] * 8 + (i % 8)[None, None, :]
        rows_h = lines + (K // 256) * 32 + at_h
        shift = (i // 8 * 2)[None, None, :]
        END_H = (K // 256) * 16
        END = (K // 256) * 32
    else:
        END = WORDS
    # Scales: of a lane's segment, or of all columns.
    if SEGMENTS == 4:
        rs = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))
        ss = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS)))
        seg = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, None, :]
    else:
        rs = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        ss = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
        seg = gl.arange(0, 1, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    ns = gl.minimum(n_block * OWN + rs % OWN, N - 1)
    matrix = (expert * MATS + rs // OWN).to(gl.int64)
    mine = (ss * CHUNKS)[:, None, None]
    halves = w_halves
    scales = w_scale
    if FOUR:
        halves = w_halves + ((matrix * N + ns) * (2 * WORDS))[None, :, None]
    elif SIX:
        begin = ((matrix * N + ns) * (4 * WORDS))[None, :, None]
        scales = w_scale + begin + (K // 256) * 192
        halves = w_halves + begin // 2 + (K // 256) * 104
    elif KIND == "fp8":
        groups = (K + 127) // 128
        at_n = matrix * ((N + 127) // 128) * groups + ns // 128 * groups
        scales = w_scale + at_n[None, :, None]
    else:
        groups = (K + (GROUP if GROUP > 64 else 64) - 1) // (GROUP if GROUP > 64 else 64)
        if GROUP == 0:
            groups = 1
        scales = w_scale + (matrix * groups * N + ns)[None, :, None]
    stride = N * 0 + 1 if KIND == "fp8" else N
    words = load_words(rows, at_w, END, 0, CHUNKS, CHUNK_WORDS, STEP, EVEN, None)
    if SIX:
        highs = load_words(rows_h, at_h, END_H, 0, CHUNKS, 8, STEP, EVEN, None)
    if AHEAD == 2:
        later = load_words(rows, at_w, END, STEP, CHUNKS, CHUNK_WORDS, STEP, EVEN, None)
        if SIX:
            later_h = load_words(rows_h, at_h, END_H, STEP, CHUNKS, 8, STEP, EVEN, None)
    scale = load_scales(scales, halves, mine, seg, K, stride, CHUNKS, KC, GROUP, KIND, EVEN)
    # Inputs: those of the column's token, where the column has this segment.
    sx = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LX))) * CHUNKS
    col = gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX)))
    ix = gl.arange(0, 8 * LANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX)))
    SIDE: gl.constexpr = 8 // SEGMENTS
    row = gl.minimum(first + col // 8 * SIDE + col % SIDE, hi - 1)
    if GATHER:
        row = gl.load(order + row) // TOPK
    own = (col % 8 // SIDE)[None, :, None] == (ix // (8 * LANE // SEGMENTS))[None, None, :]
    own = own & (sx >= 0)[:, None, None]
    kx = ix // 16 * 32 + ix % 16 if HALVES == 2 and not SIX else ix
    at_x = sx[:, None, None] * (KC // 2) + kx[None, None, :]
    xs = x + row.to(gl.int64)[None, :, None] * (K // 16 * 8) + at_x
    zero = gl.full([S, ROWS, COLS], 0.0, gl.float32, layout=MMA)
    acc = zero
    one = gl.full([S, ROWS, 16 * LANE], 0x3F80, gl.int16, layout=A).to(gl.bfloat16, bitcast=True)
    PARTS: gl.constexpr = CHUNKS * HALVES
    inputs = load_inputs(xs, at_x, own, K, 0, PARTS, HALVES, KC, HALF)
    for step in range(0, gl.cdiv(K, STEP * KC)):
        now = step * STEP
        words_now = words
        scale_now = scale
        inputs_now = inputs
        chunk = now + STEP
        if EVEN:
            chunk = gl.minimum(chunk, K // KC - STEP)
        next_words = load_words(
            rows, at_w, END, now + AHEAD * STEP, CHUNKS, CHUNK_WORDS, STEP, EVEN, None
        )
        if SIX:
            highs_now = highs
            next_high = load_words(
                rows_h, at_h, END_H, now + AHEAD * STEP, CHUNKS, 8, STEP, EVEN, None
            )
        if AHEAD == 2:
            words = later
            later = next_words
            if SIX:
                highs = later_h
                later_h = next_high
        else:
            words = next_words
            if SIX:
                highs = next_high
        scale = load_scales(
            scales, halves, mine + chunk, seg, K, stride, CHUNKS, KC, GROUP, KIND, EVEN
        )
        inputs = load_inputs(xs, at_x, own, K, (now + STEP) * KC, PARTS, HALVES, KC, HALF)
        for c in gl.static_range(CHUNKS):
            part = zero
            for h in gl.static_range(HALVES):
                b = right(inputs_now[c * HALVES + h], B)
                if SIX:
                    v = sixes_above(words_now[c] >> (4 * h), highs_now[c] >> shift, h, MAGIC)
                elif FOUR:
                    v = nibbles_above(words_now[c] >> (4 * h), MAGIC)
                else:
                    v = codes(words_now[c] >> (4 * h), MAGIC, KIND)
                a = left(v, A)
                if SEGMENTS == 4:
                    factor, least = scales_of(scale_now[c], seg, h, KIND)
                    acc += mma_v2(a, b, zero) * spread(factor, COLS, MMA)
                    if FOUR or SIX:
                        acc -= mma_v2(one, b, zero) * spread(least, COLS, MMA)
                elif GROUP == 0:
                    acc = mma_v2(a, b, acc)
                else:
                    part = mma_v2(a, b, part)
            if SEGMENTS == 1 and SCALED:
                acc += part * scale_now[c].to(gl.float32, bitcast=True)
    value = gl.sum(acc, axis=0)
    # A thread gets a row's columns, of gate and of up: no lane asks another.
    BLOCKS: gl.constexpr = COLS // 8
    FLAT: gl.constexpr = gl.BlockedLayout(
        [1, BLOCKS, SIDE, SEGMENTS, MATS], [32, 1, 1, 1, 1], [S, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, TOKENS], [32, 1], [S, 1], [1, 0])
    OUTS: gl.constexpr = gl.BlockedLayout([1, TOKENS, MATS], [32, 1, 1], [S, 1, 1], [2, 1, 0])
    v = value.reshape([MATS, OWN, BLOCKS, SEGMENTS, SIDE]).permute([1, 2, 4, 3, 0])
    v = gl.sum(gl.convert_layout(v, FLAT), axis=3).reshape([OWN, TOKENS, MATS])
    v = gl.convert_layout(v, OUTS)
    no = n_block * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))
    mo = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    if GATED:
        gate, up = gl.split(v)
        gate = gl.convert_layout(gate, OUT)
        up = gl.convert_layout(up, OUT)
        if GROUP == 0 and not SCALED:
            at = w_scale + (expert * 2).to(gl.int64) * N + no
            gate *= gl.load(at, mask=no < N, other=0).to(gl.float32, bitcast=True)[:, None]
            up *= gl.load(at + N, mask=no < N, other=0).to(gl.float32, bitcast=True)[:, None]
        if HAS_BIAS:
            gate += load_bias(bias, expert * 2, no, N)[:, None]
            up += load_bias(bias, expert * 2 + 1, no, N)[:, None]
        v = swiglu(gate, up, ACT)
    else:
        v = gl.convert_layout(v.reshape([OWN, TOKENS]), OUT)
        if GROUP == 0 and not SCALED:
            at = w_scale + expert.to(gl.int64) * N + no
            v *= gl.load(at, mask=no < N, other=0).to(gl.float32, bitcast=True)[:, None]
        if HAS_BIAS:
            v += load_bias(bias, expert, no, N)[:, None]
    to = out + mo.to(gl.int64)[None, :] * N + no[:, None]
    gl.store(to, v.to(gl.bfloat16), mask=(no < N)[:, None] & (mo < hi)[None, :])


def multiply_skinny_experts(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: SkinnyExpertsPlan,
    *,
    order: SortedPairs | None = None,
    gated: bool = False,
    gather: bool = False,
    bias: torch.Tensor | None = None,
    spec: ExpertSpec = SWIGLU,
) -> None:
    """As ``gemm.grouped.multiply``; the caller has checked shapes, dtypes and alignment."""
    words = stack.data.view(torch.int32)
    k_quant = stack.kind.endswith("_k")
    lane, parts = lane_words(stack), segments(stack)
    step = 16 * lane * (1 if stack.kind in ("int8", "fp8") else 2)  # inputs of a warp's chunk
    tokens = max(plan.tokens, 8 // parts)
    blocks = triton.cdiv(x.shape[0], tokens) if order is None else order.pairs.shape[0]
    if blocks == 0:
        return
    E = 1 if order is None else order.starts.shape[0] - 1
    pdl = launches_early(x.device)
    n_blocks = triton.cdiv(stack.N, plan.rows // (2 if gated else 1))
    x = x if x.storage_offset() % 8 == 0 else x.clone()  # read 16 bytes at a time
    skinny_experts[(blocks * n_blocks,)](
        x.view(torch.int32),
        words,
        stack.data.view(torch.int8) if k_quant else scale_words(stack),
        stack.data.view(torch.float16) if k_quant else None,
        out,
        order and order.pairs,
        order and order.starts,
        bias,
        x.shape[0],
        stack.N,
        stack.K,
        words.shape[-1] // 4,
        E,
        order.topk if order else 1,
        n_blocks,
        MAGIC,
        KIND=stack.kind,
        GROUP=scale_every(stack),
        GATED=gated,
        ACT=activation_of(spec),
        GATHER=gather,
        HAS_BIAS=bias is not None,
        E_PADDED=0 if order is None else triton.next_power_of_2(E),
        PDL=pdl,
        S=plan.num_warps,
        ROWS=plan.rows,
        COLS=tokens * parts,
        SEGMENTS=parts,
        LANE=lane,
        CHUNKS=plan.chunks,
        AHEAD=plan.ahead,
        EVEN=stack.K % (plan.num_warps * plan.chunks * step) == 0,
        LW=words_layout(lane, plan.num_warps, plan.rows),
        LX=inputs_layout(2 * lane, plan.num_warps, tokens * parts),
        LS=scales_layout(plan.num_warps, plan.rows),
        num_warps=plan.num_warps,
        **early_launch(pdl),
    )
