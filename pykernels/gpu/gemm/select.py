"""Which kernel multiplies the rows of a linear or of a layer's experts, and by which plan.

By shapes and the GPU alone. Weights that are dequantized on the way, bf16 activations, by rows (of
experts: on average):

- a linear's one row: ``gemv`` (a narrow int8 matrix, where it beats the tensor cores) or
  ``gemv_mma``;
- a few rows: ``skinny_linear`` (integers and E4M3 of a linear, up to 16, or 32 where nothing faster
  takes more) or ``skinny_experts`` (experts, and K-quants of a linear, up to 4 or 8);
- more on Hopper: ``dequant_gemm``;
- all else: ``gemm_dequant``, or K-quants and E4M3 unpacked to bfloat16 and a GEMM of that.

The interpreter runs the last kind only: it has no Gluon.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from ...shapes import SWIGLU, ExpertSpec
from ..common.launch import arch, num_sms
from ..plans.gemm import DequantPlan, ExpertsPlan, GemmPlan, LinearPlan
from ..plans.grouped import GEMV, UNPACKED, gemm_plan, split_k
from ..plans.registers import (
    dequant_experts_plan,
    dequant_plan,
    fills,
    fine_scales,
    gemv_mma_plan,
    skinny_experts_plan,
    skinny_k_quants_plan,
    skinny_plan,
)
from ..plans.tuned import EXPERTS_PLANS, LINEAR_PLANS, tuned_plan
from .grouped import dequant_step, path_of, supports_dequant, supports_warp_specialized
from .hopper.dequant import supports_stack
from .hopper.linear_fp8 import pays
from .skinny.gemv_mma import KINDS as GEMV_MMA_KINDS
from .skinny.gemv_mma import MOST_INPUTS
from .skinny.linear import KINDS as SKINNY_KINDS
from .weights import Matrices

SKINNY_ROWS = 32
"""Most rows for which each program reads all inputs itself, and half of it where
``dequant_gemm`` could multiply them too, a quarter of bytes with few scales."""
SKINNY_K_QUANT_ROWS = 8
"""The same of K-quants, four at a time."""
DEQUANT_ROWS = 1500
"""Most rows for which ``dequant_gemm`` multiplies K-quants and E4M3: more are unpacked."""
UNPACK_E4M3_ROWS = 256
"""Most rows for which ``gemm_dequant`` multiplies E4M3 on Hopper: more are unpacked."""
SPLIT_ROWS = 64
"""Most rows for which ``gemm_dequant`` splits K."""


def kernel_of(
    kind: str,
    M: int,
    N: int,
    K: int,
    num_sms: int,
    capability: tuple[int, int],
    dequant: bool,
    group: int = 128,
) -> str:
    """Which kernel multiplies a linear's rows by weights to dequantize, as tuned plans name it:
    "gemv", "gemv_mma", "skinny", "skinny_k_quants", "dequant" or, for the GEMM, "linear".

    Args:
        dequant: whether ``dequant_gemm`` has a form for these weights.
        group: inputs that share a scale.
    """
    tensor = kind in SKINNY_KINDS and capability >= (8, 0)
    dequant = dequant and capability[0] == 9
    if M == 1 and kind in GEMV and not (tensor and fills(N, num_sms)):
        return "gemv"
    if M == 1 and kind in GEMV_MMA_KINDS and K <= MOST_INPUTS and capability >= (8, 0):
        return "gemv_mma"
    coarse_bytes = kind == "int8" and group > 32 and N >= 24 * num_sms
    if tensor and M <= (SKINNY_ROWS // (4 if coarse_bytes else 2) if dequant else SKINNY_ROWS):
        return "skinny"
    if kind in UNPACKED and capability >= (8, 0):
        if M <= (SKINNY_K_QUANT_ROWS // 2 if dequant else SKINNY_K_QUANT_ROWS):
            return "skinny_k_quants"
    if kind in (*UNPACKED, "fp8"):
        dequant = dequant and M <= DEQUANT_ROWS
    return "dequant" if dequant else "linear"


def experts_kernel_of(
    op: str, kind: str, group: int, rows: float, capability: tuple[int, int], dequant: bool
) -> str:
    """The same of experts with so many rows on average: "skinny_gate_up", "skinny_down", "dequant"
    or, for the GEMM, ``op``."""
    if rows <= most_skinny_rows(kind, group, dequant) and capability >= (8, 0):
        return f"skinny_{op}"
    return "dequant" if dequant else op


def most_skinny_rows(kind: str, group: int, dequant: bool) -> int:
    """Most rows an expert, on average, for ``skinny_experts``.

    With a scale for at most 64 inputs its time grows with the rows. That of ``dequant_gemm``
    does not up to 16: it begins sooner than ``gemm_dequant`` would.

    Args:
        dequant: whether ``dequant_gemm`` could multiply them too.
    """
    if not fine_scales(kind, group):
        return 6 if dequant else 8
    return 4 if not dequant else 2 if kind in UNPACKED else 3


def select(weight: Matrices, M: int, device: torch.device, activations: str = "bf16") -> LinearPlan:
    """What ``linear`` would launch for M rows: a tuned plan, if this GPU has it."""
    N, K, kind, group = weight.N, weight.K, weight.kind, weight.group
    capability, sms = arch(device), num_sms(device)
    name = _name(device)
    path = path_of(weight, activations == "fp8")
    if path != "dequant":
        pays_off = path == "fp8" and pays(M, N, K, sms)
        specialized = pays_off and supports_warp_specialized(weight, device)
        return gemm_plan("linear", path, capability, M, N, K, name, specialized)
    op = kernel_of(kind, M, N, K, sms, capability, supports_stack(weight), group)
    if op in LINEAR_PLANS and (tuned := tuned_plan(op, kind, name, M, N, K)):
        return LINEAR_PLANS[op](**tuned)
    if op == "gemv":
        return GEMV[kind]
    if op == "gemv_mma":
        chosen = gemv_mma_plan(kind, group, N, K, sms)
        # Ampere and Ada spill K-quants of steps that are not whole into 128 registers.
        spills = capability < (9, 0) and kind.endswith("_k") and K % 512
        return replace(chosen, registers=168) if spills else chosen
    if op == "skinny":
        return skinny_plan(kind, group, M, N, sms)
    if op == "skinny_k_quants":
        return skinny_k_quants_plan(kind, M, N, sms)
    if op == "dequant":
        return dequant_plan(kind, M, N, triton.cdiv(K, 128), sms)
    if kind == "fp8" and M > UNPACK_E4M3_ROWS and capability[0] == 9:
        return replace(gemm_plan("linear", "bf16", capability, M, N, K), unpack=True)
    plan = gemm_plan("linear", kind, capability, M, N, K, name)
    if M > SPLIT_ROWS or plan.split_k > 1 or plan.unpack:
        return plan
    num_ctas = triton.cdiv(N, plan.block_n) * triton.cdiv(M, plan.block_m)
    return replace(plan, split_k=split_k(num_ctas, K, sms, dequant_step(weight, plan)))


def select_experts(
    op: str,
    stack: Matrices,
    activations: str,
    rows: float,
    device: torch.device,
    aligned: bool = True,
    spec: ExpertSpec = SWIGLU,
) -> ExpertsPlan:
    """The same for the product ``op``, "gate_up" or "down", of experts with so many rows each.

    Args:
        rows: of an expert that may have any, on average.
        aligned: whether the rows that are multiplied begin at a multiple of 16 bytes.
        spec: the experts'; warp-specialized kernels have that of SwiGLU alone.
    """
    N, K, kind = stack.N, stack.K, stack.kind
    capability, name = arch(device), _name(device)
    path = path_of(stack, activations == "fp8")
    if path != "dequant":
        specialized = aligned and spec == SWIGLU and supports_warp_specialized(stack, device)
        return gemm_plan(op, path, capability, rows, N, K, name, specialized)
    kernel = experts_kernel_of(
        op, kind, stack.group, rows, capability, supports_dequant(stack, device)
    )
    tuned = tuned_plan(op if kernel == "dequant" else kernel, kind, name, rows, N, K)
    if kernel in EXPERTS_PLANS:
        if tuned:
            return EXPERTS_PLANS[kernel](**tuned)
        return skinny_experts_plan(kind, stack.group, rows, K)
    if kernel == "dequant":
        if tuned:
            return DequantPlan(**tuned) if "cols" in tuned else GemmPlan(**tuned)
        return dequant_experts_plan(kind, rows)
    return gemm_plan(op, kind, capability, rows, N, K, name)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
