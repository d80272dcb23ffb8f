"""Linear layers with quantized weights, from one row to thousands (what Marlin is for elsewhere).

- One to four rows of int4 or int8: ``gemv``, no tensor cores.
- Up to 16 rows: the decoding GEMM, K split over programs so that every processor reads; the parts
  are added by a second launch in a fixed order.
- More: the GEMM of the routed experts, with one expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from ..errors import PykernelsError
from .gemv import multiply_few
from .grouped_gemm import decoded_step, multiply, path_of
from .launch import arch, check_device
from .launch import supports as device_supports
from .matrices import K_MULTIPLE, KINDS, Matrices
from .partials import add_partials
from .plan import GEMV, GemmPlan, GemvPlan, gemm_plan, gemv_plan, split_k
from .quantize import quantize_fp8

ACTIVATIONS = ("bf16", "fp8")
SPLIT_ROWS = 16
"""Most rows for which K is split."""


def supports(kind: str, K: int, device: torch.device, activations: str = "bf16") -> str | None:
    """None if ``linear`` multiplies matrices of this kind there, or the reason why not."""
    if reason := device_supports(device):
        return reason
    if kind not in KINDS:
        return f"{kind} has no GPU layout (only {', '.join(KINDS)})"
    if K % K_MULTIPLE[kind]:
        return f"{kind} takes inputs in multiples of {K_MULTIPLE[kind]}, not {K}"
    if activations not in ACTIVATIONS:
        return f"there are no {activations!r} activations (only {', '.join(ACTIVATIONS)})"
    if activations == "fp8" and kind != "fp8":
        return f"{kind} weights are not multiplied with fp8 activations"
    return None


def linear(
    x: torch.Tensor,
    weight: Matrices,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "bf16",
    plan: GemmPlan | GemvPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: bfloat16 [M, K], contiguous.
        weight: one matrix [N, K] (``matrices.pack_for_gpu`` of one weight).
        bias: [N], any float dtype.
        activations: "bf16"; "fp8" (fp8 weights only) quantizes x for each row and 128 inputs.
        plan: in place of the one that ``gpu.plan`` chooses: a GemvPlan asks for ``gemv``.
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
    if bias is not None and bias.shape != (N,):
        raise PykernelsError(f"bias {tuple(bias.shape)} for {N} outputs", "Give [N]")
    if out is None:
        out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    if out.shape != (M, N) or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise PykernelsError(
            f"out is {out.dtype} {tuple(out.shape)}", f"Give contiguous bfloat16 [{M}, {N}]"
        )
    if M == 0:
        return out
    plan = plan or choose_plan(weight, M, device, activations)
    if isinstance(plan, GemvPlan):
        if weight.kind not in GEMV or M > 4:
            raise PykernelsError(
                f"no gemv for {M} rows of {weight.kind}", "Give int4 or int8 and up to 4 rows"
            )
        multiply_few(x, weight, out, bias, plan)
        return out
    rows, scale = quantize_fp8(x) if activations == "fp8" else (x, None)
    if plan.split_k == 1:
        multiply(rows, weight, out, plan, x_scale=scale, bias=bias)
        return out
    if path_of(weight, scale is not None) != "decoded":
        raise PykernelsError("only decoded weights are split over K", "Give a plan with split_k=1")
    parts = torch.empty(plan.split_k, M, N, dtype=torch.float32, device=device)
    multiply(rows, weight, parts, plan)
    add_partials(parts, out, bias)
    return out


def choose_plan(
    weight: Matrices, M: int, device: torch.device, activations: str = "bf16"
) -> GemmPlan | GemvPlan:
    """What ``linear`` would launch for M rows."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else ""
    if few := gemv_plan(weight.kind, M, weight.N, weight.K, name):
        return few
    path = path_of(weight, activations == "fp8")
    key = weight.kind if path == "decoded" else path
    plan = gemm_plan("linear", key, arch(device), M, weight.N, weight.K, name)
    if path != "decoded" or M > SPLIT_ROWS or plan.split_k > 1:
        return plan
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 132
    programs = triton.cdiv(weight.N, plan.block_n) * triton.cdiv(M, plan.block_m)
    parts = split_k(programs, weight.K, processors, decoded_step(weight, plan))
    return replace(plan, split_k=parts)
