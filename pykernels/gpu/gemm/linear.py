"""Linear layers with quantized weights, from one row to thousands (what Marlin is for elsewhere).

``select`` says which kernel multiplies how many rows. Where K is split over programs, the parts are
added by a second launch in a fixed order.
"""

from __future__ import annotations

import torch
import triton

from ...errors import PykernelsError
from ...quant import Format, get_format
from ..common.launch import FLOATS, arch, check_device, why_not
from ..common.launch import supports as device_supports
from ..common.strides import check_out
from ..plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    LinearPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
)
from ..quantize import quantize_fp8
from .grouped import multiply, path_of
from .hopper.dequant import multiply_dequant, supports_stack
from .select import select
from .skinny.gemv_int8 import KINDS as GEMV_KINDS
from .skinny.gemv_int8 import multiply_gemv_int8
from .skinny.gemv_mma import KINDS as GEMV_MMA_KINDS
from .skinny.gemv_mma import MOST_INPUTS, multiply_gemv_mma
from .skinny.linear import KINDS as SKINNY_KINDS
from .skinny.linear import multiply_skinny
from .split_k import add_partials
from .weights import Matrices, supports_format

ACTIVATIONS = ("bf16", "fp8")


def supports(
    fmt: Format | str, K: int, device: torch.device, activations: str = "bf16"
) -> str | None:
    """None if ``linear`` multiplies matrices of this format there, or the reason why not.

    Args:
        fmt: a format or its name; a kind of ``Matrices`` is the name of one of its formats.
        K: inputs.
        activations: as `linear`'s.
    """
    if reason := device_supports(device):
        return reason
    if isinstance(fmt, str):
        if reason := why_not(get_format, fmt):
            return reason
        fmt = get_format(fmt)
    if activations not in ACTIVATIONS:
        return f"there are no {activations!r} activations (only {', '.join(ACTIVATIONS)})"
    if activations == "fp8" and fmt.name != "fp8":
        return f"{fmt.name} weights are not multiplied with fp8 activations"
    return supports_format(fmt, K)


def linear(
    x: torch.Tensor,
    weight: Matrices,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "bf16",
    plan: LinearPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: bfloat16 [M, K], contiguous.
        weight: one matrix [N, K] (``weights.pack_for_gpu`` of one weight).
        bias: [N], bfloat16, float16 or float32.
        activations: "bf16"; "fp8" (fp8 weights only) quantizes x for each row and 128 inputs.
        plan: in place of the one that ``select`` chooses; its type says which kernel.
        out: bfloat16 [M, N].

    Returns:
        bfloat16 [M, N], rounded once from float32 sums.

    Raises:
        PykernelsError: shapes, dtypes, devices or a plan that do not fit, or no kernel for them.
    """
    device = check_device(x, weight.data, *(() if bias is None else (bias,)))
    if reason := supports(weight.kind, weight.K, device, activations):
        raise PykernelsError(f"no GPU kernel multiplies this: {reason}", "See linear.supports()")
    if len(weight) != 1:
        raise PykernelsError(f"a stack of {len(weight)} matrices", "Give a stack of one")
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != weight.K or not x.is_contiguous():
        raise PykernelsError(
            f"x is {x.dtype} {tuple(x.shape)}", f"Give contiguous bfloat16 [M, {weight.K}]"
        )
    M, N = x.shape[0], weight.N
    if bias is not None and (bias.shape != (N,) or bias.dtype not in FLOATS):
        raise PykernelsError(
            f"bias {bias.dtype} {tuple(bias.shape)} for {N} outputs", "Give floats [N]"
        )
    bias = None if bias is None else bias.contiguous()
    out = check_out(out, x, M, N, dtype=torch.bfloat16)
    if not out.numel():
        return out
    plan = plan or select(weight, M, device, activations)
    if reason := _unfit(plan, weight, M, device, activations):
        raise PykernelsError(f"no kernel for that plan: {reason}", "Leave the plan out")
    if isinstance(plan, GemvInt8Plan):
        multiply_gemv_int8(x, weight, out, bias, plan)
        return out
    if isinstance(plan, GemvMmaPlan):
        multiply_gemv_mma(x, weight, out, bias, plan)
        return out
    if isinstance(plan, SkinnyPlan):
        multiply_skinny(x, weight, out, bias, plan)
        return out
    if isinstance(plan, SkinnyExpertsPlan):
        multiply(x, weight, out, plan, bias=bias)
        return out
    if isinstance(plan, DequantPlan):
        multiply_dequant(x, weight, out, bias, plan)
        return out
    rows, scale = quantize_fp8(x) if activations == "fp8" else (x, None)
    if plan.split_k == 1:
        multiply(rows, weight, out, plan, x_scale=scale, bias=bias)
        return out
    parts = torch.empty(plan.split_k, M, N, dtype=torch.float32, device=device)
    multiply(x, weight, parts, plan)
    add_partials(parts, out, bias)
    return out


def _unfit(
    plan: LinearPlan, weight: Matrices, M: int, device: torch.device, activations: str
) -> str | None:
    """Why this plan's kernel cannot multiply these, or None."""
    if isinstance(plan, GemmPlan):
        if plan.split_k > 1 and path_of(weight, activations == "fp8") != "dequant":
            return "only weights to dequantize are split over K"
        return None
    if activations == "fp8":
        return "fp8 activations go by a GemmPlan"
    if isinstance(plan, GemvInt8Plan):
        fits = weight.kind in GEMV_KINDS and M == 1
        return None if fits else f"no gemv for {M} rows of {weight.kind}"
    capability = arch(device)
    if isinstance(plan, GemvMmaPlan):
        fits = weight.kind in GEMV_MMA_KINDS and M == 1 and capability >= (8, 0)
        if not fits:
            return f"gemv_mma takes one row of {', '.join(GEMV_MMA_KINDS)} on a GPU"
        if weight.kind.endswith("_k") and plan.num_warps == 1:
            return "gemv_mma takes the blocks of K-quants by two warps or more"
        return None if weight.K <= MOST_INPUTS else f"gemv_mma takes up to {MOST_INPUTS} inputs"
    if isinstance(plan, SkinnyExpertsPlan):
        fits = path_of(weight, False) == "dequant" and capability >= (8, 0)
        return None if fits else "skinny_experts dequantizes weights, on a GPU"
    if isinstance(plan, SkinnyPlan):
        fits = weight.kind in SKINNY_KINDS and M <= 64 and capability >= (8, 0)
        return (
            None
            if fits
            else f"skinny_linear takes up to 64 rows of {', '.join(SKINNY_KINDS)} on a GPU"
        )
    if capability[0] != 9 or not supports_stack(weight):
        return "dequant_gemm takes integers, E4M3 and K-quants, on Hopper"
    steps = triton.cdiv(weight.K, 128)
    full = triton.cdiv(steps, triton.cdiv(steps, plan.split_k)) == plan.split_k
    return None if full else f"{steps} steps in {plan.split_k} parts leave one empty"
