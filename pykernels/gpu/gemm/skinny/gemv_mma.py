"""One row times a matrix of integers, E4M3 or K-quants, at the rate that memory gives them.

As in ``skinny_linear``, weights are the left operand of ``mma.sync`` (sm_80 on), loaded 16 bytes a
lane straight into the lane that multiplies them. What is left to do for each is next to nothing:

- A code that is masked where it lies *is* a bfloat16: a number n in the low eight bits of one is
  n * 2**-133, subnormal or just above, which tensor cores multiply at full rate. Two nibbles of a
  half word need no shift between them: the inputs of the upper ones carry a sixteenth. (Q6_K's are
  shifted: two bits more come from another word.)
- E4M3's bits, moved to the top of the mantissa, are a bfloat16 2**120 too small.
- Each program first copies the inputs to shared memory, in the codes' order and times 2**64.
- Codes keep their offset. It goes out with the sum of a chunk's inputs, where a chain of products
  begins.
- One row needs one of a product's eight columns. Where several scales meet in a chunk, columns are
  of its parts: of two groups of 32, four each; of Q6_K's four groups of 16, two each.
- Q4_K's minimums go out as offsets do. Each lane unpacks the scales of its own rows and part.

About 1.1 instructions a weight of 4 bits, 1.4 of 8, 2.7 of Q4_K and 3.5 of Q6_K. The warps of a
program share its rows and part K; their sums are added in shared memory, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_compat import barrier, reinterpret
from ...common.launch import early_launch, launches_early
from ...plans.gemm import GemvMmaPlan
from ..weights import Matrices, scale_every, scale_words
from .gemv_mma_scales import block_heads_layout, columns_layout, q6_k_words, scales_of
from .gemv_mma_steps import (
    LANE,
    block_sums,
    codes_of,
    inputs_layout,
    multiply_block,
    own_rows,
    prefetch,
    stage_inputs,
)
from .operands import words_layout

OFFSETS = {"int4": 8, "int8": 128, "fp8": 0, "q4_k": 1, "q6_k": 32}
KINDS = tuple(OFFSETS)
MOST_INPUTS = 32768
"""All of them are in shared memory, 2 bytes each, and some sums; smaller GPUs have 99 KiB."""
FLIP = -0x7F7F7F80
"""Signs of four bytes. A run-time number: one instruction has room for one constant."""


@gluon.jit
def of_rows(no, w_scale, bias, N, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Scales and biases of rows, if there are: prefetched before the products, that nothing waits
    for them behind these."""
    row_scale = gl.full(no.shape, 1.0, gl.float32, layout=no.type.layout)
    row_bias = gl.full(no.shape, 0.0, gl.float32, layout=no.type.layout)
    if GROUP == 0:
        row_scale = gl.load(w_scale + no, mask=no < N, other=0).to(gl.float32, bitcast=True)
    if HAS_BIAS:
        row_bias = gl.load(bias + no, mask=no < N, other=0.0).to(gl.float32)
    return row_scale, row_bias


@gluon.jit(do_not_specialize=["FLIP"])
def gemv_mma(
    x,
    w,
    w_scale,
    out,
    bias,
    N,
    K,
    WORDS,
    FLIP,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    ONCE: gl.constexpr,
    STEPS: gl.constexpr,
    EVEN: gl.constexpr,
    S: gl.constexpr,
    ROWS: gl.constexpr,
    AHEAD: gl.constexpr,
    TOGETHER: gl.constexpr,
    USED: gl.constexpr,
    OFFSET: gl.constexpr,
    PARTS: gl.constexpr,
    LW: gl.constexpr,
    LX: gl.constexpr,
    LC: gl.constexpr,
    LF: gl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k]: a program USED rows of w at a time, all of K.

    In each of STEPS steps each of the S warps takes 16 words of every row (Q6_K: and 8 of high
    bits).

    Args:
        x: bfloat16 [K]; from 2**64 on they are infinite here.
        w: int32 [N, WORDS].
        w_scale: int32 (see ``gemm.weights``) or, for fp8, float32; K-quants: None.
        GROUP: inputs of one scale; 0: one scale an output.
        PDL: the kernel behind may be launched while this one runs, and this one was.
        ONCE: there is a program for each block of rows.
        EVEN: the steps end where the rows do.
        AHEAD: steps between asking for weights and multiplying them, at most STEPS.
        TOGETHER: steps whose inputs are brought to shared memory at a time.
        OFFSET: of codes; 1: minimums are scales of their own.
        USED: of ROWS rows, which a power of two must be: the others are the last again.
        PARTS: of a chunk, that have columns of a product for themselves.
        LW, LX, LC, LF: layouts of words, inputs, a product's columns, and scales.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    CW: gl.constexpr = 16
    NIBBLES: gl.constexpr = KIND != "int8" and KIND != "fp8"
    HALVES: gl.constexpr = 2 if NIBBLES else 1
    KC: gl.constexpr = CW * (8 if NIBBLES else 4)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LS: gl.constexpr = gl.SliceLayout(3, LF)
    SUMS: gl.constexpr = S * HALVES if PARTS > 1 else S
    PAIRS: gl.constexpr = gl.int32 if PARTS > 1 else gl.bfloat16
    BATCHES: gl.constexpr = (STEPS + TOGETHER - 1) // TOGETHER
    IN_ALL: gl.constexpr = BATCHES * TOGETHER
    xs_all = gl.allocate_shared_memory(
        gl.bfloat16, [BATCHES, TOGETHER * HALVES * S, 4 * CW], SHARED
    )
    sums_all = gl.allocate_shared_memory(gl.float32, [BATCHES, TOGETHER * SUMS, PARTS], SHARED)
    xs = reinterpret(xs_all, PAIRS, [IN_ALL, HALVES * S, 2 * CW if PARTS > 1 else 4 * CW], SHARED)
    sums = reinterpret(sums_all, gl.float32, [IN_ALL, SUMS, PARTS], SHARED)
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    i = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    CODES = WORDS
    if KIND == "q4_k":  # a block: a head of 4 words, and two chunks
        gl.static_assert(S % 2 == 0, "a warp has the same half of each block")
        WORDS = K // 256 * 36  # so it is known to be a multiple of 4
        CODES = WORDS
        first = (s // 2 * 36 + 4 + s % 2 * CW)[:, None, None] + i[None, None, :]
    else:
        first = s[:, None, None] * CW + i[None, None, :]
    if KIND == "q6_k":
        gl.static_assert(S % 2 == 0, "two chunks share a block's scale")
        CODES, WORDS = K // 256 * 32, q6_k_words(K)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW)))
    row = gl.minimum(row, USED - 1)
    left_over = CODES - first
    chunk = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS)))
    own = own_rows(ROWS, MMA)
    scale_row = gl.minimum(own_rows(ROWS, LS), USED - 1)
    begin = gl.program_id(0)
    at = codes_of(w, gl.minimum(begin * USED + row, N - 1), first, s, i, CODES, WORDS, KIND)
    n_scales = gl.minimum(begin * USED + scale_row, N - 1)
    scales = scales_of(w, w_scale, n_scales, chunk, K, KIND, LF)
    ACROSS: gl.constexpr = S * KC // 256 if S * KC > 256 else 1
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [S // ACROSS, ACROSS], [1, 0])
    k = gl.arange(0, TOGETHER, layout=gl.SliceLayout(1, FLAT))[:, None] * (S * KC)
    k += gl.arange(0, S * KC, layout=gl.SliceLayout(0, FLAT))[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    words = ()
    scale = ()
    for t in gl.static_range(AHEAD):
        next_words, factors = prefetch(
            at, scales, chunk, t, left_over, N, K, KIND, GROUP, EVEN or t < STEPS - 1, LF
        )
        words += (next_words,)  # type: ignore[assignment]
        scale += (factors,)  # type: ignore[assignment]
    values = ()
    for t in gl.static_range(0, STEPS, TOGETHER):
        mask = k < K - t * (S * KC)
        values += (gl.load(x + t * (S * KC) + k, mask=mask, other=0.0),)  # type: ignore[assignment]
    IN_PLACE: gl.constexpr = KIND == "int4" or KIND == "q4_k"  # 16 times as large in upper halves
    BLOCK: gl.constexpr = 32 if IN_PLACE else 4 * CW
    UP: gl.constexpr = 2.0**60 if IN_PLACE else 2.0**64
    for t in gl.static_range(BATCHES):
        stage_inputs(values[t], xs_all.index(t), sums_all.index(t), S, BLOCK, OFFSET, UP)
    barrier()  # here, or it would be in the loop
    if ONCE:  # a loop of one turn would have its addresses made in front of it, in registers
        no = gl.where(own < USED, begin * USED + own, N)
        row_scale, row_bias = of_rows(no, w_scale, bias, N, GROUP, HAS_BIAS)
        words, scale, acc = multiply_block(
            words,
            scale,
            at,
            scales,
            at,
            scales,
            xs,
            sums,
            chunk,
            left_over,
            N,
            K,
            FLIP,
            KIND,
            GROUP,
            STEPS,
            EVEN,
            ROWS,
            True,
            AHEAD,
            MMA,
            LX,
            LC,
            LF,
        )
        value = block_sums(acc, KIND, PARTS) * row_scale + row_bias
        gl.store(out + no, value.to(gl.bfloat16), mask=no < N)
    else:
        for block in range(begin, gl.cdiv(N, USED), gl.num_programs(0)):
            no = gl.where(own < USED, block * USED + own, N)
            row_scale, row_bias = of_rows(no, w_scale, bias, N, GROUP, HAS_BIAS)
            after = block + gl.num_programs(0)
            after = gl.where(after * USED < N, after, block)  # beyond the last: it is in L2
            n = gl.minimum(after * USED + row, N - 1)
            at_next = codes_of(w, n, first, s, i, CODES, WORDS, KIND)
            n_scales = gl.minimum(after * USED + scale_row, N - 1)
            scales_next = scales_of(w, w_scale, n_scales, chunk, K, KIND, LF)
            words, scale, acc = multiply_block(
                words,
                scale,
                at,
                scales,
                at_next,
                scales_next,
                xs,
                sums,
                chunk,
                left_over,
                N,
                K,
                FLIP,
                KIND,
                GROUP,
                STEPS,
                EVEN,
                ROWS,
                False,
                AHEAD,
                MMA,
                LX,
                LC,
                LF,
            )
            value = block_sums(acc, KIND, PARTS) * row_scale + row_bias
            gl.store(out + no, value.to(gl.bfloat16), mask=no < N)
            at, scales = at_next, scales_next


def multiply_gemv_mma(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: GemvMmaPlan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes, dtypes and alignment.

    Args:
        x: bfloat16 [1, K].
        stack: one matrix of one of ``KINDS``.
        out: bfloat16 [1, N].
    """
    words = stack.data[0].view(torch.int32)
    parts = {"q4_k": 2, "q6_k": 4}.get(stack.kind, 2 if stack.group == 32 else 1)
    inputs = 4 * LANE * plan.num_warps * (4 if stack.kind in ("int8", "fp8") else 8)
    steps = triton.cdiv(stack.K, inputs)
    columns = columns_layout(plan.num_warps, plan.rows, parts)
    pdl = launches_early(x.device)
    used = plan.used or plan.rows
    blocks = triton.cdiv(stack.N, used)
    num_ctas = min(plan.num_ctas or blocks, blocks)
    gemv_mma[(num_ctas,)](
        x,
        words,
        scale_words(stack),
        out,
        bias,
        stack.N,
        stack.K,
        words.shape[1],
        FLIP,
        KIND=stack.kind,
        GROUP={"q4_k": 32, "q6_k": 16}.get(stack.kind, scale_every(stack)),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        ONCE=num_ctas == blocks,
        STEPS=steps,
        EVEN=stack.K % inputs == 0,
        S=plan.num_warps,
        ROWS=plan.rows,
        AHEAD=min(plan.ahead, steps),
        TOGETHER=min(8, triton.next_power_of_2(steps), max(1, 4096 // inputs)),
        USED=used,
        OFFSET=OFFSETS[stack.kind],
        LW=words_layout(LANE, plan.num_warps, plan.rows),
        LX=inputs_layout(plan.num_warps, parts),
        PARTS=parts,
        LC=columns,
        LF=block_heads_layout(plan.num_warps, plan.rows) if stack.kind == "q4_k" else columns,
        num_warps=plan.num_warps,
        **({"maxnreg": plan.registers} if plan.registers else {}),
        **early_launch(pdl),
    )
