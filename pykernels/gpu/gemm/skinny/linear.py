"""Up to 64 rows times a matrix of int4, int8 or E4M3 weights, at the rate that memory gives them.

Weights are the left operand of ``mma.sync`` (sm_80 on), loaded 16 bytes a lane straight into the
lane that multiplies them and dequantized there (see ``common.dequant_mma``): about 2.3 instructions
a weight for up to 8 rows, where more would cost as much as memory does. The warps of a program
share its rows and part K; their sums are added in shared memory, in a fixed order. All that a step
reads (weights, scales and, for up to 8 rows, inputs) is prefetched one step ahead or, where a step
has few bytes, two: each of them comes from device memory, and a step that waited for any would wait
as long as for all.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.dequant_mma import MAGIC, codes
from ...common.launch import early_launch, launches_early
from ...plans.gemm import SkinnyPlan
from ..weights import Matrices, scale_every, scale_words
from .operands import inputs_layout, left, load_words, right, words_layout

KINDS = ("int4", "int8", "fp8")


@gluon.jit
def load_inputs(xs, at, K, FIRST, CHUNKS: gl.constexpr, HALVES: gl.constexpr, KC: gl.constexpr):
    """Inputs of each half of each chunk."""
    inputs = ()
    for i in gl.static_range(CHUNKS * HALVES):
        k = FIRST + i // HALVES * KC + i % HALVES * 32
        inputs += (gl.load(xs + k, mask=at < K - k, other=0.0),)  # type: ignore[assignment]
    return inputs


@gluon.jit
def load_scales(
    scales,
    chunk,
    N,
    K,
    CHUNKS: gl.constexpr,
    KC: gl.constexpr,
    GROUP: gl.constexpr,
    KIND: gl.constexpr,
):
    """Words (fp8: float32) of each chunk: what GROUP inputs share, or two groups of 32."""
    found = ()
    if GROUP > 0:
        PER: gl.constexpr = 128 if KIND == "fp8" else (64 if GROUP == 32 else GROUP)
        STRIDE = 1 if KIND == "fp8" else N
        for c in gl.static_range(CHUNKS):
            k = ((chunk + c) * KC)[:, None]
            found += (gl.load(scales + k // PER * STRIDE, mask=k < K, other=0),)  # type: ignore[assignment]
    return found


@gluon.jit(do_not_specialize=["M", "MAGIC"])
def skinny_linear(
    x,
    w,
    w_scale,
    out,
    bias,
    M,
    N,
    K,
    WORDS,
    MAGIC,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    S: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    LANE: gl.constexpr,
    CHUNKS: gl.constexpr,
    AHEAD: gl.constexpr,
    LW: gl.constexpr,
    LX: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k]: one program ROWS rows of w, all of K.

    In a step each of the S warps takes CHUNKS chunks of 4 LANE words of every row.

    Args:
        x: bfloat16 [M, K], M <= COLS.
        w: int32 [N, WORDS].
        w_scale: int32 (see ``gemm.weights``) or, for fp8, float32.
        GROUP: inputs of one scale; 0: one scale an output.
        PDL: the kernel behind may be launched while this one runs, and this one was.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    CW: gl.constexpr = 4 * LANE
    PER: gl.constexpr = 8 if KIND == "int4" else 4
    HALVES: gl.constexpr = 2 if KIND == "int4" else 1
    KC: gl.constexpr = CW * PER
    STEP: gl.constexpr = S * CHUNKS
    EARLY: gl.constexpr = COLS <= 8
    n0 = gl.program_id(0) * ROWS
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    n = gl.minimum(n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW))), N - 1)
    i = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    at_w = s[:, None, None] * (CW * CHUNKS) + i[None, None, :]
    rows = w + n.to(gl.int64)[None, :, None] * WORDS + at_w
    sx = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LX)))
    m = gl.minimum(gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX))), M - 1)
    kx = gl.arange(0, 16 * LANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX)))
    if KIND == "int4":
        kx = kx // 32 * 64 + kx % 32
    at_x = sx[:, None, None] * (KC * CHUNKS) + kx[None, None, :]
    xs = x + m[None, :, None] * K + at_x
    ns = gl.minimum(
        n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA))), N - 1
    )
    chunk = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA))) * CHUNKS
    if KIND == "fp8":
        scales = w_scale + (ns // 128 * gl.cdiv(K, 128))[None, :]
    else:
        scales = w_scale + ns[None, :]
    zero = gl.full([S, ROWS, COLS], 0.0, gl.float32, layout=MMA)
    acc = zero
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    words = load_words(rows, at_w, WORDS, 0, CHUNKS, CW, STEP, False, 0)
    if AHEAD == 2:
        later = load_words(rows, at_w, WORDS, STEP, CHUNKS, CW, STEP, False, 0)
    scale = load_scales(scales, chunk, N, K, CHUNKS, KC, GROUP, KIND)
    if EARLY:
        inputs = load_inputs(xs, at_x, K, 0, CHUNKS, HALVES, KC)
    for step in range(0, gl.cdiv(WORDS, STEP * CW)):
        k = step * (STEP * KC)
        if not EARLY:
            inputs = load_inputs(xs, at_x, K, k, CHUNKS, HALVES, KC)
        words_now = words
        scale_now = scale
        inputs_now = inputs
        chunk += STEP
        next_words = load_words(
            rows, at_w, WORDS, (step + AHEAD) * STEP, CHUNKS, CW, STEP, False, 0
        )
        if AHEAD == 2:
            words = later
            later = next_words
        else:
            words = next_words
        scale = load_scales(scales, chunk, N, K, CHUNKS, KC, GROUP, KIND)
        if EARLY:
            inputs = load_inputs(xs, at_x, K, k + STEP * KC, CHUNKS, HALVES, KC)
        for c in gl.static_range(CHUNKS):
            part = zero
            for h in gl.static_range(HALVES):
                b = right(inputs_now[c * HALVES + h], B)
                a = left(codes(words_now[c] >> (4 * h), MAGIC, KIND), A)
                if GROUP == 0:
                    acc = mma_v2(a, b, acc)
                elif GROUP == 32:
                    sc = scale_now[c]
                    if KIND == "int4":
                        sc = sc & -65536 if h == 1 else sc << 16
                    else:
                        odd = (chunk + (c - STEP)) % 2 == 1
                        sc = gl.where(odd[:, None], sc & -65536, sc << 16)
                    acc += mma_v2(a, b, zero) * sc.to(gl.float32, bitcast=True)[:, :, None]
                else:
                    part = mma_v2(a, b, part)
            if GROUP > 32:
                sc = scale_now[c]
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


def multiply_skinny(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: SkinnyPlan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes, dtypes and alignment.

    Args:
        x: bfloat16 [M, K], M from 1 to 64.
        stack: one matrix of one of ``KINDS``.
        out: bfloat16 [M, N].
    """
    words = stack.data[0].view(torch.int32)
    lane = 2 if stack.group == 32 else 4
    cols = max(8, triton.next_power_of_2(x.shape[0]))
    pdl = launches_early(x.device)
    skinny_linear[(triton.cdiv(stack.N, plan.rows),)](
        x,
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
        GROUP=scale_every(stack),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        S=plan.num_warps,
        ROWS=plan.rows,
        COLS=cols,
        LANE=lane,
        CHUNKS=plan.chunks,
        AHEAD=plan.ahead,
        LW=words_layout(lane, plan.num_warps, plan.rows),
        LX=inputs_layout(4 * lane, plan.num_warps, cols),
        num_warps=plan.num_warps,
        **early_launch(pdl),
    )
