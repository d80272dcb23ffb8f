"""The grouped GEMM: sorted tokens with their experts' matrices, or all rows with one matrix.

The plan's type and fields say which kernel multiplies them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import PykernelsError
from ...shapes import SWIGLU, ExpertSpec, SortedPairs
from ..common.launch import arch
from ..limits import UNPACK_SCRATCH as SCRATCH
from ..plans.gemm import DequantPlan, ExpertsPlan, GemmPlan, SkinnyExpertsPlan
from ..plans.grouped import fit_stages
from ..plans.registers import fine_scales
from ..quantize import NATIVE_FP8
from .hopper.bf16 import multiply_bf16
from .hopper.dequant import EXPERT_KINDS, multiply_dequant_experts, supports_stack
from .hopper.fp8 import multiply_fp8
from .hopper.linear_fp8 import multiply_rows
from .skinny.experts import multiply_skinny_experts
from .tiles import activation_of, block_bound
from .triton_kernels import gemm_bf16, gemm_dequant, gemm_fp8
from .unpack import runs, unpack
from .weights import Matrices, scale_every, scale_words

MOST_FINE_TOKENS = 8
"""Most rows of ``skinny_experts`` where each has four columns of a product, a scale in each."""


def path_of(stack: Matrices, fp8_inputs: bool) -> str:
    """What the kernels for these matrices do: see ``plans.grouped.PATHS``."""
    if fp8_inputs:
        return "fp8"
    return "bf16" if stack.kind == "bf16" else "dequant"


def multiply(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: ExpertsPlan,
    *,
    x_scale: torch.Tensor | None = None,
    order: SortedPairs | None = None,
    gated: bool = False,
    gather: bool = False,
    bias: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    spec: ExpertSpec = SWIGLU,
) -> None:
    """out = x @ w.T by ``plan``; the caller has checked shapes and dtypes.

    Args:
        x: bfloat16 [rows, K], or E4M3 with ``x_scale`` float32 [rows, ceil(K / 128)].
        out: [S or M, N]; with ``plan.split_k`` above 1 float32 [split_k, M, N], parts of the sum.
        order: the rows' experts; None: one matrix for all rows.
        gated: the stack has two matrices an expert: out = ``ref.activation.swiglu`` of gate's
            and up's outputs.
        gather: x has tokens, of which each sorted slot's is read; else it has the sorted rows.
        bias: [N], with ``order`` [matrices, N], as they lie in their stack.
        out_scale: warp-specialized and gated, float32 [S, ceil(N / 128)]: out is quantized to E4M3.
        spec: what a gated product becomes; its ``bias`` says nothing here.

    Raises:
        PykernelsError: a plan whose kernel does not multiply these.
    """
    if isinstance(plan, DequantPlan):
        _launch_dequant_experts(x, stack, out, plan, order, gated, gather, bias, spec)
        return
    path = path_of(stack, x_scale is not None)
    if isinstance(plan, SkinnyExpertsPlan):
        if path != "dequant" or arch(x.device) < (8, 0):
            raise PykernelsError(
                "skinny_experts dequantizes weights, on a GPU",
                "Give a GemmPlan",
            )
        if plan.tokens > MOST_FINE_TOKENS and fine_scales(stack.kind, stack.group):
            raise PykernelsError(
                f"a plan has tokens={plan.tokens} for {stack.kind} with a scale for 64 inputs or "
                "fewer",
                f"Use up to {MOST_FINE_TOKENS}",
            )
        multiply_skinny_experts(
            x,
            stack,
            out,
            plan,
            order=order,
            gated=gated,
            gather=gather,
            bias=bias,
            spec=spec,
        )
        return
    if plan.unpack:
        if path != "dequant":
            raise PykernelsError("a plan unpacks what is not packed", "Give one without unpack")
        multiply_unpacked(x, stack, out, plan, order, gated, gather, bias, spec=spec)
        return
    if plan.warp_specialized:
        if order is not None and (bias is not None or activation_of(spec) is not None):
            raise PykernelsError(
                "warp-specialized kernels have experts without biases and with silu(gate) * up",
                "Give a plan without warp_specialized",
            )
        _warp_specialized(x, stack, out, plan, x_scale, order, gated, gather, bias, out_scale)
        return
    if plan.split_k > 1 and (order is not None or path != "dequant"):
        raise PykernelsError(
            "only linears of weights to dequantize are split over K", "Give a plan with split_k=1"
        )
    mats = 2 if gated else 1
    plan = fit_stages(plan, arch(x.device), _step_bytes(stack, path, plan, mats))
    cols = plan.block_n // mats if path == "bf16" else plan.block_n
    n_blocks = triton.cdiv(stack.N, cols)
    if order is None:
        M, E, blocks = x.shape[0], 1, triton.cdiv(x.shape[0], plan.block_m)
    else:
        M, E = order.pairs.shape[0], order.starts.shape[0] - 1
        blocks = block_bound(M, E, plan.block_m)
    if blocks == 0:
        return
    common: dict[str, Any] = {
        "order": order and order.pairs,
        "starts": order and order.starts,
        "bias": bias,
        "M": M,
        "E": E,
        "N": stack.N,
        "K": stack.K,
        "TOPK": order.topk if order else 1,
        "N_BLOCKS": n_blocks,
        "GATED": gated,
        "ACT": activation_of(spec),
        "GATHER": gather,
        "HAS_BIAS": bias is not None,
        "E_PADDED": 0 if order is None else triton.next_power_of_2(E),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "GROUP_M": plan.group_m,
        "STAGES": plan.num_stages,
        "num_warps": plan.num_warps,
    }
    if path == "dequant":
        _launch_dequant(x, stack, out, plan, blocks * n_blocks, common)
        return
    block_k = plan.block_k if path == "bf16" else 128
    # Descriptors want 16-byte addresses; tensors that begin elsewhere are read through pointers.
    tma = {
        "W_TMA": plan.tma and stack.data.data_ptr() % 16 == 0,
        "X_TMA": plan.tma and not gather and x.data_ptr() % 16 == 0,
        "EVEN_K": stack.K % block_k == 0,
    }
    native = path == "bf16" or arch(x.device) >= NATIVE_FP8
    if not native:
        x, data = x.view(torch.uint8), stack.data.view(torch.uint8)
    else:
        data = stack.data
    w: Any = data
    rows: Any = x
    if tma["W_TMA"]:
        w = TensorDescriptor.from_tensor(data, [mats if path == "bf16" else 1, cols, block_k])
    if tma["X_TMA"]:
        rows = TensorDescriptor.from_tensor(x, [plan.block_m, block_k])
    grid = (blocks * n_blocks,)
    if path == "bf16":
        gemm_bf16[grid](rows, w, out, **common, **tma, BLOCK_K=block_k)
    else:
        gemm_fp8[grid](rows, x_scale, w, stack.scale, out, **common, **tma, NATIVE=native)


def _warp_specialized(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    x_scale: torch.Tensor | None,
    order: SortedPairs | None,
    gated: bool,
    gather: bool,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:
    matched = stack.kind == ("bf16" if x_scale is None else "fp8")
    known = x_scale is not None or order is not None
    if not (
        matched
        and known
        and not gather
        and x.data_ptr() % 16 == 0
        and supports_warp_specialized(stack, x.device)
    ):
        raise PykernelsError(
            "warp-specialized kernels multiply aligned E4M3, and experts of aligned bfloat16, by"
            " sorted rows of the same, on Hopper",
            "Give a plan without warp_specialized",
        )
    if x.shape[0] == 0:
        return
    if x_scale is None and order is not None:
        multiply_bf16(x, stack, out, order, gated=gated, group_m=plan.group_m)
    elif x_scale is not None and order is None:
        multiply_rows(x, x_scale, stack, out, bias, plan.group_m)
    elif x_scale is not None and order is not None:
        multiply_fp8(
            x,
            x_scale,
            stack,
            out,
            order,
            gated=gated,
            group_m=plan.group_m,
            out_scale=out_scale,
        )


def _launch_dequant_experts(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: DequantPlan,
    order: SortedPairs | None,
    gated: bool,
    gather: bool,
    bias: torch.Tensor | None,
    spec: ExpertSpec,
) -> None:
    shared = plan.split_k > 1 or plan.num_ctas
    if order is None or shared or not supports_dequant(stack, x.device):
        raise PykernelsError(
            "dequant_gemm multiplies experts of integers and K-quants on Hopper, K in one part",
            "Give a GemmPlan",
        )
    if order.pairs.shape[0]:
        multiply_dequant_experts(x, stack, out, order, plan, gated, gather, bias, spec)


def supports_dequant(stack: Matrices, device: torch.device) -> bool:
    """Whether ``dequant_gemm`` multiplies these weights there."""
    if arch(device)[0] != 9:
        return False
    return stack.kind in EXPERT_KINDS and supports_stack(stack)


def supports_warp_specialized(stack: Matrices, device: torch.device) -> bool:
    """Whether ``GemmPlan.warp_specialized`` can run: Hopper, weights where descriptors can
    begin."""
    mask = stack.kind in ("bf16", "fp8") and arch(device)[0] == 9
    return mask and stack.data.data_ptr() % 16 == 0


def _launch_dequant(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    num_ctas: int,
    common: dict[str, Any],
) -> None:
    data = stack.data.view(torch.uint8)
    block_k = dequant_step(stack, plan)
    steps = triton.cdiv(stack.K, block_k)
    gemm_dequant[(num_ctas, plan.split_k)](
        x,
        data,
        scale_words(stack),
        out,
        **common,
        ROW_BYTES=data.shape[-1],
        K_SPLIT=triton.cdiv(steps, plan.split_k) * block_k,
        KIND=stack.kind,
        GROUP=scale_every(stack),
        NATIVE=arch(x.device) >= NATIVE_FP8,
        BLOCK_K=block_k,
    )


def _step_bytes(stack: Matrices, path: str, plan: GemmPlan, mats: int) -> int:
    """Shared memory of one stage: a tile of inputs and the tiles of weights, as they are stored."""
    if path == "bf16":
        return 2 * plan.block_k * (plan.block_m + plan.block_n)
    if path == "fp8":
        return 128 * (plan.block_m + mats * plan.block_n) + 4 * plan.block_m
    step = dequant_step(stack, plan)
    weights = stack.nbytes * step // stack.K // stack.N  # scales included
    return 2 * step * plan.block_m + mats * plan.block_n * (weights + 4)


def wants_sorted_rows(plan: ExpertsPlan, stack: Matrices, fp8_inputs: bool) -> bool:
    """Whether a gated product's rows are to be copied into the experts' order first: its kernel
    loads them by the tensor memory accelerator, which gathers none."""
    if not isinstance(plan, GemmPlan):
        return False
    unpacked = plan.unpack or path_of(stack, fp8_inputs) != "dequant"
    return plan.warp_specialized or (plan.copy and plan.tma and unpacked)


def dequant_step(stack: Matrices, plan: GemmPlan) -> int:
    """Inputs of one step: whole superblocks of K-quants, and no step beyond K."""
    if stack.kind == "q4_k":
        return 256
    step = max(plan.block_k, 128 if stack.kind == "q6_k" else 64)
    while stack.K % step:
        step //= 2
    return step


def multiply_unpacked(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    order: SortedPairs | None,
    gated: bool,
    gather: bool,
    bias: torch.Tensor | None,
    limit: int = SCRATCH,
    spec: ExpertSpec = SWIGLU,
) -> None:
    """See ``multiply``; ``plan`` is for bfloat16 weights.

    Args:
        limit: bytes of unpacked weights at a time, if not less than one expert's or 256 rows'.
    """
    plan, mats = replace(plan, unpack=False), 2 if gated else 1
    if order is None:
        for n, rows in runs(stack.N, 2 * stack.K, max(limit, 512 * stack.K)):
            part_of_w = unpack(stack, _scratch(x, 1, rows, stack.K), n)
            whole = rows == stack.N
            part = out if whole else torch.empty_like(out[:, :rows])
            multiply(x, part_of_w, part, plan, bias=None if bias is None else bias[n : n + rows])
            if not whole:
                out[:, n : n + rows] = part
        return
    E = order.starts.shape[0] - 1
    for e, count in runs(E, 2 * mats * stack.N * stack.K, limit):
        scratch = _scratch(x, mats * count, stack.N, stack.K)
        unpacked = unpack(stack, scratch, e, order, mats)
        some_bias = None if bias is None else bias.view(-1, mats, stack.N)[e : e + count]
        some = replace(order, starts=order.starts[e : e + count + 1])
        multiply(
            x,
            unpacked,
            out,
            plan,
            order=some,
            gated=gated,
            gather=gather,
            bias=some_bias,
            spec=spec,
        )


def _scratch(x: torch.Tensor, count: int, N: int, K: int) -> torch.Tensor:
    return torch.empty(count, N, K, dtype=torch.bfloat16, device=x.device)
