"""One row times a matrix of int4, int8 or E4M3 weights, at the rate that memory gives them.

As in ``few_rows``, weights are the left operand of ``mma.sync`` (sm_80 on), loaded 16 bytes a lane
straight into the lane that multiplies them. What is left to do for each is next to nothing:

- A code that is masked where it lies *is* a bfloat16: a number n in the low eight bits of one is
  n * 2**-133, subnormal or just above, which tensor cores multiply at full rate. Two nibbles of a
  half word need no shift between them: the inputs of the upper ones carry a sixteenth.
- E4M3's bits, moved to the top of the mantissa, are a bfloat16 2**120 too small.
- Each program first copies the inputs to shared memory, in the codes' order and times 2**64.
- Codes keep their offset. It goes out with the sum of a chunk's inputs, where a chain of products
  begins.

About 1.1 instructions a weight of 4 bits and 1.4 of 8. The warps of a program share its rows and
part K; their sums are added in shared memory, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .few_rows import layouts
from .gluon_names import barrier, reinterpret
from .launch import early_launch, launches_early
from .matrices import Matrices, scale_every, scale_words
from .plan_types import OneRowPlan
from .register_words import pair, powers

KINDS = ("int4", "int8", "fp8")
MOST_INPUTS = 32768
"""All of them are in shared memory, 2 bytes each; smaller GPUs have 99 KiB."""
FLIP = -0x7F7F7F80
"""Signs of four bytes. A run-time number: one instruction has room for one constant."""


def inputs_layout(lane: int, warps: int) -> object:
    """Inputs [warps, 16 lane] of a product: lane 4 g + t has the t-th part of each."""
    return gl.DistributedLinearLayout(
        [[0, a] for a in powers(1, 16 * lane // 4)],
        [[0, 4 * lane], [0, 8 * lane], [0, 0], [0, 0], [0, 0]],
        [[part, 0] for part in powers(1, warps)],
        [],
        [warps, 16 * lane],
    )


@gluon.jit
def bits_of(words, FLIP, KIND: gl.constexpr, HALF: gl.constexpr):
    """Words -> of bytes 0 and 2, and of 1 and 3, what makes a bfloat16 of each in its place."""
    later = words >> 8
    if KIND == "int4":
        mask: gl.constexpr = 0x00F000F0 if HALF == 1 else 0x000F000F
        even, odd = words & mask, later & mask
    elif KIND == "int8":
        even, odd = (words ^ FLIP) & 0x00FF00FF, (later ^ FLIP) & 0x00FF00FF
    else:
        even = ((words << 4) & 0x07F007F0) | ((words << 8) & -2147450880)
        odd = ((words >> 4) & 0x07F007F0) | (words & -2147450880)
    return even, odd


@gluon.jit
def left(words, FLIP, KIND: gl.constexpr, HALF: gl.constexpr, A: gl.constexpr):
    """[S, ROWS, 4 LANE] words -> [S, ROWS, 16 LANE] codes."""
    S: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    LANE: gl.constexpr = words.shape[2] // 4
    even, odd = bits_of(words, FLIP, KIND, HALF)
    a, b = pair(even)
    c, d = pair(odd)
    v = gl.join(gl.join(a, b), gl.join(c, d)).reshape([S, ROWS, 4, LANE, 2, 2])
    return gl.convert_layout(v.permute([0, 1, 3, 5, 2, 4]).reshape([S, ROWS, 16 * LANE]), A)


@gluon.jit
def right(x, COLS: gl.constexpr, B: gl.constexpr):
    """[S, 16 LANE] inputs of a lane's words after each other -> [S, 16 LANE, COLS], all alike."""
    S: gl.constexpr = x.shape[0]
    LANE: gl.constexpr = x.shape[1] // 16
    v = x.reshape([S, 4, LANE, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([S, 16 * LANE])
    v = gl.convert_layout(v, gl.SliceLayout(2, B))
    return v.expand_dims(2).broadcast_to([S, 16 * LANE, COLS])


@gluon.jit
def stage_inputs(
    value, x, total, S: gl.constexpr, BLOCK: gl.constexpr, OFFSET: gl.constexpr
):  # fmt: skip
    """[STEPS, inputs of a step] to shared memory: x in the codes' order, total -OFFSET times the
    sums that belong to it."""
    STEPS: gl.constexpr = value.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    HALVES: gl.constexpr = value.shape[1] // (S * WIDTH)
    if OFFSET > 0:
        # As they lie: Triton 3.6 adds up the wrong lanes where those of a sum are no neighbours.
        PARTS: gl.constexpr = total.shape[0] // (STEPS * S)
        v = value.to(gl.float32).reshape([STEPS, S, PARTS, value.shape[1] // (S * PARTS)])
        sums = gl.sum(v, axis=3).permute([0, 2, 1]).reshape([total.shape[0]])
        total.store(sums * (-OFFSET * 2.0**-69))
    v = value.reshape([STEPS, S, WIDTH // BLOCK, HALVES, BLOCK // 4, 2, 2])
    v = v.permute([0, 3, 1, 2, 4, 6, 5]).reshape([STEPS, HALVES, S, WIDTH]).to(gl.float32)
    L: gl.constexpr = v.type.layout
    half = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    up = gl.where(half == 0, 2.0**64, 2.0**60)[None, :, None, None]
    x.store((v * up).to(gl.bfloat16).reshape([STEPS * HALVES * S, WIDTH]))


@gluon.jit
def load_step(at, step, left_over, EVEN: gl.constexpr, WIDTH: gl.constexpr):
    """Words of a step; ``left_over``: how many words of a row each lane's first one leaves."""
    if EVEN:
        return gl.load(at + step * WIDTH, eviction_policy="evict_first")
    there = left_over > step * WIDTH
    return gl.load(at + step * WIDTH, mask=there, other=0, eviction_policy="evict_first")


@gluon.jit
def scales_of(w_scale, n, K, KIND: gl.constexpr):
    """Where the scales of rows n begin."""
    if KIND == "fp8":
        n = n // 128 * gl.cdiv(K, 128)
    return w_scale + n[None, :]


@gluon.jit
def load_scale(
    scales, chunk, N, K, KC: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Words (fp8: float32) of a chunk: what GROUP inputs share, or two groups of 32."""
    PER: gl.constexpr = 128 if KIND == "fp8" else (64 if GROUP == 32 else GROUP)
    STRIDE = 1 if KIND == "fp8" else N
    k = (chunk * KC if EVEN else gl.minimum(chunk * KC, K - 1))[:, None]
    return gl.load(scales + k // PER * STRIDE)


@gluon.jit
def multiply_step(
    acc, words, scale, x, total, chunk, FLIP, KIND: gl.constexpr, GROUP: gl.constexpr,
    CHAINS: gl.constexpr, A: gl.constexpr, B: gl.constexpr, LX: gl.constexpr,
):  # fmt: skip
    """acc plus a step's products; x [HALVES S, 16 LANE] and total [S or HALVES S] are shared."""
    COLS: gl.constexpr = acc.shape[2]
    S: gl.constexpr = acc.shape[0]
    HALVES: gl.constexpr = x.shape[0] // S
    MMA: gl.constexpr = acc.type.layout
    part = acc
    for h in gl.static_range(HALVES):
        b = right(x.slice(h * S, S).load(LX), COLS, B)
        a = left(words, FLIP, KIND, h, A)
        if h * S < total.shape[0]:
            first = gl.full(acc.shape, 0.0, gl.float32, layout=MMA)
            if KIND != "fp8":
                sums = total.slice(h * S, S).load(gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
                first += sums[:, None, None]
            part = acc + first if GROUP == 0 else first
        if CHAINS == 2 and h * S >= total.shape[0]:
            part += mma_v2(a, b, gl.full(acc.shape, 0.0, gl.float32, layout=MMA))
        else:
            part = mma_v2(a, b, part)
        if GROUP == 32:
            if KIND == "int4":
                sc = scale & -65536 if h == 1 else scale << 16
            else:
                sc = gl.where((chunk % 2 == 1)[:, None], scale & -65536, scale << 16)
            acc += part * sc.to(gl.float32, bitcast=True)[:, :, None]
    if GROUP == 0:
        acc = part
    elif GROUP > 32:
        acc += part * (scale if KIND == "fp8" else scale.to(gl.float32, bitcast=True))[:, :, None]
    return acc


@gluon.jit(do_not_specialize=["FLIP"])
def one_row(
    x, w, w_scale, out, bias, N, K, WORDS, FLIP,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    ONCE: gl.constexpr, STEPS: gl.constexpr, EVEN: gl.constexpr,
    S: gl.constexpr, ROWS: gl.constexpr, LANE: gl.constexpr, AHEAD: gl.constexpr,
    TOGETHER: gl.constexpr, CHAINS: gl.constexpr, LW: gl.constexpr, LX: gl.constexpr,
):  # fmt: skip
    """out[n] = sum over k of x[k] * w[n, k]: a program ROWS rows of w at a time, all of K.

    In each of STEPS steps each of the S warps takes 4 LANE words of every row.

    Args:
        x: bfloat16 [K].
        w: int32 [N, WORDS].
        w_scale: int32 (see ``matrices``) or, for fp8, float32.
        GROUP: inputs of one scale; 0: one scale an output.
        PDL: the kernel behind may be launched while this one runs, and this one was.
        ONCE: there is a program for each block of rows.
        EVEN: the steps end where the rows do.
        AHEAD: steps between asking for weights and multiplying them, at most STEPS.
        TOGETHER: steps whose inputs are brought to shared memory at a time.
        CHAINS: see ``OneRowPlan``.
    """
    COLS: gl.constexpr = 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    CW: gl.constexpr = 4 * LANE
    PER: gl.constexpr = 8 if KIND == "int4" else 4
    HALVES: gl.constexpr = 2 if KIND == "int4" else 1
    KC: gl.constexpr = CW * PER
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = HALVES if GROUP == 32 else 1
    BATCHES: gl.constexpr = (STEPS + TOGETHER - 1) // TOGETHER
    IN_ALL: gl.constexpr = BATCHES * TOGETHER
    xs_all = gl.allocate_shared_memory(
        gl.bfloat16, [BATCHES, TOGETHER * HALVES * S, 16 * LANE], SHARED
    )
    sums_all = gl.allocate_shared_memory(gl.float32, [BATCHES, TOGETHER * PARTS * S], SUMS)
    xs = reinterpret(xs_all, gl.bfloat16, [IN_ALL, HALVES * S, 16 * LANE], SHARED)
    sums = reinterpret(sums_all, gl.float32, [IN_ALL, PARTS * S], SUMS)
    s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    i = gl.arange(0, CW, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    first = s[:, None, None] * CW + i[None, None, :]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW)))
    left_over = WORDS - first
    chunk = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    scale_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    begin = gl.program_id(0)
    at = w + gl.minimum(begin * ROWS + row, N - 1).to(gl.int64)[None, :, None] * WORDS + first
    scales = scales_of(w_scale, gl.minimum(begin * ROWS + scale_row, N - 1), K, KIND)
    ACROSS: gl.constexpr = S * KC // 256 if S * KC > 256 else 1
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [S // ACROSS, ACROSS], [1, 0])
    k = gl.arange(0, TOGETHER, layout=gl.SliceLayout(1, FLAT))[:, None] * (S * KC)
    k += gl.arange(0, S * KC, layout=gl.SliceLayout(0, FLAT))[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    words = ()
    for t in gl.static_range(AHEAD):
        words += (load_step(at, t, left_over, EVEN, S * CW),)  # type: ignore[assignment]
    values = ()
    for t in gl.static_range(0, STEPS, TOGETHER):
        exists = k < K - t * (S * KC)
        values += (gl.load(x + t * (S * KC) + k, mask=exists, other=0.0),)  # type: ignore[assignment]
    scale = ()
    for t in gl.static_range(AHEAD):
        if GROUP > 0:
            factors = load_scale(scales, chunk + t * S, N, K, KC, GROUP, KIND, EVEN)
            scale += (factors,)  # type: ignore[assignment]
        else:
            scale += (chunk,)  # type: ignore[assignment]
    OFFSET: gl.constexpr = 8 if KIND == "int4" else (128 if KIND == "int8" else 0)
    BLOCK: gl.constexpr = 32 if KIND == "int4" else 16 * LANE
    for t in gl.static_range(BATCHES):
        stage_inputs(values[t], xs_all.index(t), sums_all.index(t), S, BLOCK, OFFSET)
    barrier()  # here, or it would be in the loop
    TURNS: gl.constexpr = (STEPS - AHEAD) // AHEAD
    TURN: gl.constexpr = STEPS % AHEAD
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [S], [0])
    DOWN: gl.constexpr = (2.0**56 if KIND == "fp8" else 2.0**69) / COLS  # all columns are alike
    for tile in range(begin, begin + 1 if ONCE else gl.cdiv(N, ROWS), gl.num_programs(0)):
        no = tile * ROWS + gl.arange(0, ROWS, layout=OUT)
        # Asked for here: behind the loop they would be waited for.
        if GROUP == 0:
            row_scale = gl.load(w_scale + no, mask=no < N, other=0)
        if HAS_BIAS:
            row_bias = gl.load(bias + no, mask=no < N, other=0.0).to(gl.float32)
        acc = gl.full([S, ROWS, COLS], 0.0, gl.float32, layout=MMA)
        for turn in range(0, TURNS):
            for q in gl.static_range(AHEAD):
                step = turn * AHEAD + q
                mine = chunk + step * S
                words_now, scale_now = words[q], scale[q]  # type: ignore[var-annotated]
                asked = load_step(at, step + AHEAD, left_over, EVEN, S * CW)
                words = words[:q] + (asked,) + words[q + 1 :]
                if GROUP > 0:
                    factors = load_scale(scales, mine + AHEAD * S, N, K, KC, GROUP, KIND, EVEN)
                    scale = scale[:q] + (factors,) + scale[q + 1 :]
                acc = multiply_step(
                    acc, words_now, scale_now, xs.index(step), sums.index(step), mine, FLIP,
                    KIND, GROUP, CHAINS, A, B, LX,
                )  # fmt: skip
        if not ONCE:  # beyond the last block this one's, which are in L2
            after = tile + gl.num_programs(0)
            after = gl.where(after * ROWS < N, after, tile)
            n = gl.minimum(after * ROWS + row, N - 1)
            at_next = w + n.to(gl.int64)[None, :, None] * WORDS + first
            n = gl.minimum(after * ROWS + scale_row, N - 1)
            scales_next = scales_of(w_scale, n, K, KIND)
        for t in gl.static_range(TURNS * AHEAD, STEPS):
            mine = chunk + t * S
            words_now, scale_now = words[t % AHEAD], scale[t % AHEAD]
            asked, factors = words_now, scale_now
            there = chunk + (t + AHEAD) % STEPS * S
            if t + AHEAD < STEPS:
                asked = load_step(at, t + AHEAD, left_over, EVEN, S * CW)
                if GROUP > 0:
                    factors = load_scale(scales, there, N, K, KC, GROUP, KIND, EVEN)
            elif not ONCE:
                asked = load_step(at_next, t + AHEAD - STEPS, left_over, EVEN, S * CW)
                if GROUP > 0:
                    factors = load_scale(scales_next, there, N, K, KC, GROUP, KIND, EVEN)
            words = words[: t % AHEAD] + (asked,) + words[t % AHEAD + 1 :]
            scale = scale[: t % AHEAD] + (factors,) + scale[t % AHEAD + 1 :]
            acc = multiply_step(
                acc, words_now, scale_now, xs.index(t), sums.index(t), mine, FLIP, KIND, GROUP,
                CHAINS, A, B, LX,
            )  # fmt: skip
        if not ONCE:
            words = words[TURN:] + words[:TURN]  # type: ignore[assignment]
            scale = scale[TURN:] + scale[:TURN]  # type: ignore[assignment]
            at = at_next
            scales = scales_next
        value = gl.sum(gl.sum(acc, axis=2), axis=0)
        value = gl.convert_layout(value * DOWN, OUT)
        if GROUP == 0:
            value *= row_scale.to(gl.float32, bitcast=True)
        if HAS_BIAS:
            value += row_bias
        gl.store(out + no, value.to(gl.bfloat16), mask=no < N)


def multiply_one_row(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: OneRowPlan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes, dtypes and alignment.

    Args:
        x: bfloat16 [1, K].
        stack: one matrix of one of ``KINDS``.
        out: bfloat16 [1, N].
    """
    words = stack.data[0].view(torch.int32)
    lane = 2 if stack.group == 32 else 4
    step = 4 * lane * plan.warps
    steps = triton.cdiv(words.shape[1], step)
    inputs = step * (8 if stack.kind == "int4" else 4)
    words_layout, _ = layouts(lane, plan.warps, plan.rows, 8)
    pdl = launches_early(x.device)
    blocks = triton.cdiv(stack.N, plan.rows)
    programs = min(plan.programs or blocks, blocks)
    one_row[(programs,)](
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
        GROUP=scale_every(stack),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        ONCE=programs == blocks,
        STEPS=steps,
        EVEN=words.shape[1] % step == 0,
        S=plan.warps,
        ROWS=plan.rows,
        LANE=lane,
        AHEAD=min(plan.ahead, steps),
        TOGETHER=min(8, triton.next_power_of_2(steps), max(1, 4096 // inputs)),
        CHAINS=plan.chains,
        LW=words_layout,
        LX=inputs_layout(lane, plan.warps),
        num_warps=plan.warps,
        **({"maxnreg": plan.registers} if plan.registers else {}),
        **early_launch(pdl),
    )
