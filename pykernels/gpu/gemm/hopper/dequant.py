"""The GEMM of int4, int8, MXFP4, E4M3 and K-quants on Hopper, of a linear or of each expert.

Which tiles a program multiplies and where it puts them; the loop over K is in ``dequant_mma``. A
linear's programs have one tile or one part of its K each (split-K), or they share all steps evenly
(stream-K): where tiles are no whole number of waves, the last wave's steps are dealt out to all
programs, and a second launch adds up the parts, always in one order.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....shapes import SWIGLU, ExpertSpec, SortedPairs
from ...common.dequant_mma import MAGIC
from ...common.gluon_compat import barrier
from ...plans.gemm import DequantPlan
from ..split_k import add_partials, add_shares
from ..tiles import activation_of, swiglu, tile_table
from ..weights import Matrices, scale_every, scale_words
from .dequant_mma import multiply_tile, rows_of, words_layout
from .k_quants import heads_layout
from .permute_k import permute_k

EXPERT_KINDS = ("int4", "int8", "mxfp4", "q4_k", "q6_k")
"""Kinds of experts that it is worth taking; of linears E4M3 too."""
KINDS = (*EXPERT_KINDS, "fp8")
_scratch = torch.empty


def supports_stack(stack: Matrices) -> bool:
    """Whether these weights can be multiplied."""
    groups = (0, 32, 128, stack.K)  # 0: K-quants
    return stack.kind in KINDS and stack.group in groups and stack.data.data_ptr() % 16 == 0


@gluon.jit
def share(program, num_ctas, total):
    """The first of a program's even share of ``total`` steps, and of the next one's."""
    first = (program.to(gl.int64) * total // num_ctas).to(gl.int32)
    return first, ((program + 1).to(gl.int64) * total // num_ctas).to(gl.int32)


@gluon.jit
def put(out, acc, m0, n0, M, N):
    """bfloat16 out[m0 + m, n0 + r] = acc[r, m]."""
    n = n0 + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    m = m0 + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    to = out + m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(to, acc.to(gl.bfloat16), mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit
def halves(acc):
    """The first and the second half of the columns."""
    R: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1] // 2
    return gl.split(acc.reshape([R, 2, C]).permute([0, 2, 1]))


@gluon.jit
def put_tile(out, acc, m0, n0, M, N):
    """``put``; many columns in quarters: all addresses at a time are more than registers hold."""
    C: gl.constexpr = acc.shape[1] // 4
    if C >= 32:
        left, right = halves(acc)
        a, b = halves(left)
        put(out, a, m0, n0, M, N)
        put(out, b, m0 + C, n0, M, N)
        a, b = halves(right)
        put(out, a, m0 + 2 * C, n0, M, N)
        put(out, b, m0 + 3 * C, n0, M, N)
    else:
        put(out, acc, m0, n0, M, N)


@gluon.jit(do_not_specialize=["M", "STEPS", "SHARE", "SCALES", "BLOCKS", "WHOLE", "TILES", "MAGIC"])
def dequant_gemm(
    x,
    w,
    w_scale,
    out,
    parts,
    bias,
    tiles,
    M,
    N,
    STEPS,
    SHARE,
    SCALES,
    BLOCKS,
    WHOLE,
    TILES,
    MAGIC,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SPREAD: gl.constexpr,
    COLS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    WORD_STAGES: gl.constexpr,
    LW: gl.constexpr,
    LH: gl.constexpr,
    XS: gl.constexpr,
    WS: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], COLS rows of x by 16 WARPS rows of w.

    Program (i, j) adds up steps j * SHARE .. (j + 1) * SHARE - 1 of 128 inputs; with ``parts`` it
    writes them as they are to ``parts`` + j * M * N.

    SPREAD: program p multiplies every so many of the first WHOLE tiles, then its ``share`` of the
    steps of the others, which it writes to ``parts``: see ``even_shares``.

    Args:
        x: descriptor of bfloat16 [M, STEPS * 128], K permuted (``permute_k``).
        w: descriptor of int32 [matrices * N, words]; blocks of 16 WARPS rows, gated 8 WARPS.
        w_scale: int32 [matrices, SCALES, N], see ``gemm.weights``; of E4M3 [matrices, N / 128,
            SCALES]; of K-quants their words; each row has SCALES blocks (Q6_K: 16 bytes).
        parts: float32 or None.
        tiles: None: one matrix; else ``tile_table``'s for COLS rows: rows are experts' ones.
        BLOCKS: of M; with a table its bound.
        GATED: of experts: out = ``swiglu`` of gate's and up's.
    """
    ROWS: gl.constexpr = 16 * WARPS
    OUTPUTS: gl.constexpr = ROWS // 2 if GATED else ROWS
    MATS: gl.constexpr = 2 if GATED else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLS, 16])
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 64], XS)
    ws = gl.allocate_shared_memory(gl.int32, [WORD_STAGES * MATS, OUTPUTS, 16], WS)
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [WORD_STAGES, 1], mbarrier.MBarrierLayout())
    for q in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(q), count=1)
    for q in gl.static_range(WORD_STAGES):
        mbarrier.init(w_ready.index(q), count=1)
    barrier()
    if SPREAD:
        program = gl.program_id(0)
        num_ctas = gl.num_programs(0)
        first, end = share(program, num_ctas, (TILES - WHOLE) * STEPS)
        rounds = WHOLE // num_ctas
        t = first - rounds * STEPS
        done = 0
        while t < end:
            tile = program + (t - first + rounds * STEPS) // STEPS * num_ctas
            c0 = 0
            count = STEPS
            if t >= first:
                tile = WHOLE + t // STEPS
                c0 = t % STEPS
                count = gl.minimum(STEPS - c0, end - t)
            m0 = tile % BLOCKS * COLS
            n0 = tile // BLOCKS * OUTPUTS
            acc = multiply_tile(
                x,
                w,
                w_scale,
                xs,
                ws,
                x_ready,
                w_ready,
                0,
                m0,
                n0,
                N,
                STEPS,
                c0,
                count,
                done,
                SCALES,
                MAGIC,
                KIND,
                GROUP,
                GATED,
                COLS,
                WARPS,
                STAGES,
                WORD_STAGES,
                LW,
                LH,
            )
            r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
            m = gl.arange(0, COLS, layout=gl.SliceLayout(0, ACC))
            if t >= first:
                at = parts + (tile - WHOLE + program).to(gl.int64) * (ROWS * COLS)
                gl.store(at + m[None, :] * ROWS + r[:, None], acc)
            else:
                n = n0 + r
                if HAS_BIAS:
                    own = gl.load(bias + n, mask=n < N, other=0.0)
                    acc += own.to(gl.float32)[:, None]
                put_tile(out, acc, m0, n0, M, N)
            done += count
            t += count
    else:
        if tiles is None:
            expert = 0
            m0 = gl.program_id(0) % BLOCKS * COLS
            hi = M
            n0 = gl.program_id(0) // BLOCKS * OUTPUTS
        else:
            n_blocks = gl.cdiv(N, OUTPUTS)
            block = gl.program_id(0) // n_blocks
            mask = block < gl.load(tiles + 4 * BLOCKS)
            expert = gl.load(tiles + 4 * block, mask=mask, other=-1)
            m0 = gl.load(tiles + 4 * block + 1, mask=mask, other=0)
            hi = gl.load(tiles + 4 * block + 2, mask=mask, other=0)
            n0 = gl.program_id(0) % n_blocks * OUTPUTS
        c0 = gl.program_id(1) * SHARE
        count = gl.where(expert < 0, 0, gl.minimum(SHARE, STEPS - c0))
        acc = multiply_tile(
            x,
            w,
            w_scale,
            xs,
            ws,
            x_ready,
            w_ready,
            expert,
            m0,
            n0,
            N,
            STEPS,
            c0,
            count,
            0,
            SCALES,
            MAGIC,
            KIND,
            GROUP,
            GATED,
            COLS,
            WARPS,
            STAGES,
            WORD_STAGES,
            LW,
            LH,
        )
        if HAS_BIAS:
            no, up = rows_of(n0, N, ROWS, GATED, ACC)
            matrix = (gl.maximum(expert, 0) * MATS).to(gl.int64) + up
            own = gl.load(bias + matrix * N + no).to(gl.float32)
            acc += gl.where(expert < 0, 0.0, own)[:, None]
        if GATED:
            gate, up = gl.split(acc.reshape([WARPS, 2, 8, COLS]).permute([0, 2, 3, 1]))
            acc = swiglu(gate, up, ACT).reshape([OUTPUTS, COLS])
        OUT: gl.constexpr = gl.BlockedLayout(
            [8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, WARPS], [0, 1]
        )
        n = n0 + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, OUT))
        m = m0 + gl.arange(0, COLS, layout=gl.SliceLayout(0, OUT))
        mask = (m < hi)[None, :] & (n < N)[:, None]
        at = (gl.program_id(1) * M + m).to(gl.int64)[None, :] * N + n[:, None]
        if parts is None:
            gl.store(out + at, gl.convert_layout(acc.to(gl.bfloat16), OUT), mask=mask)
        else:
            gl.store(parts + at, gl.convert_layout(acc, OUT), mask=mask)


def multiply_dequant(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    plan: DequantPlan,
) -> None:
    """out = x @ w.T + bias; the caller has checked shapes, dtypes and ``supports_stack``.

    Args:
        x: bfloat16 [M, K].
        stack: one matrix.
        out: bfloat16 [M, N].
    """
    M, N, device = *out.shape, x.device
    blocks = triton.cdiv(M, plan.cols)
    inputs = permute_k(x, stack.kind)
    if plan.num_ctas:
        rows, steps = 16 * plan.num_warps, triton.cdiv(stack.K, 128)
        tiles = blocks * triton.cdiv(N, rows)
        shared = tiles % plan.num_ctas
        pieces = shared + plan.num_ctas if shared else 1
        parts = _scratch(pieces, plan.cols, rows, dtype=torch.float32, device=device)
        _launch(inputs, stack, out, parts, bias, None, blocks, False, plan)
        if shared:
            add_shares(parts, out, bias, tiles, shared, steps, plan.num_ctas)
    elif plan.split_k > 1:
        parts = _scratch(plan.split_k, M, N, dtype=torch.float32, device=device)
        _launch(inputs, stack, out, parts, None, None, blocks, False, plan)
        add_partials(parts, out, bias)
    else:
        _launch(inputs, stack, out, None, bias, None, blocks, False, plan)


def multiply_dequant_experts(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    order: SortedPairs,
    plan: DequantPlan,
    gated: bool,
    gather: bool,
    bias: torch.Tensor | None = None,
    spec: ExpertSpec = SWIGLU,
) -> None:
    """See ``gemm.grouped.multiply``."""
    tiles, bound = tile_table(order, plan.cols)
    inputs = permute_k(x, stack.kind, order, gather)
    _launch(inputs, stack, out, None, bias, tiles, bound, gated, plan, spec)


def _scales(stack: Matrices) -> int:
    """What the kernel has to know of a row's length: its scales, or its blocks."""
    if stack.kind == "q6_k":
        return stack.data.shape[-1] // 16
    if stack.kind == "q4_k":
        return stack.K // 256
    return triton.cdiv(stack.K, max(scale_every(stack) or stack.K, 64))


def _launch(
    inputs: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    parts: torch.Tensor | None,
    bias: torch.Tensor | None,
    tiles: torch.Tensor | None,
    blocks: int,
    gated: bool,
    plan: DequantPlan,
    spec: ExpertSpec = SWIGLU,
) -> None:
    words = stack.data.view(torch.int32).flatten(0, 1)
    scale = scale_words(stack)
    steps = triton.cdiv(stack.K, 128)
    rows = (8 if gated else 16) * plan.num_warps
    x_shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    w_shared = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    count = blocks * triton.cdiv(stack.N, rows)
    num_ctas = plan.num_ctas
    dequant_gemm[(num_ctas,) if num_ctas else (count, plan.split_k)](
        TensorDescriptor.from_tensor(inputs, [plan.cols, 64], x_shared),
        TensorDescriptor.from_tensor(words, [rows, 16], w_shared),
        scale.view(torch.int32) if scale is not None else words,
        out,
        parts,
        bias,
        tiles,
        inputs.shape[0],
        stack.N,
        steps,
        triton.cdiv(steps, plan.split_k),
        _scales(stack),
        blocks,
        count - count % num_ctas if num_ctas else 0,
        count,
        MAGIC,
        KIND=stack.kind,
        GROUP=scale_every(stack) if scale is not None else 256,
        GATED=gated,
        ACT=activation_of(spec),
        HAS_BIAS=bias is not None,
        SPREAD=num_ctas > 0,
        COLS=plan.cols,
        WARPS=plan.num_warps,
        STAGES=plan.num_stages,
        WORD_STAGES=plan.word_stages,
        LW=words_layout(plan.num_warps, rows // plan.num_warps),
        LH=heads_layout(plan.num_warps, 16)
        if stack.kind == "q4_k"
        else words_layout(plan.num_warps, 16),
        XS=x_shared,
        WS=w_shared,
        num_warps=plan.num_warps,
        **({"maxnreg": plan.registers} if plan.registers else {}),
    )
