"""Which kernel multiplies a linear's rows, and how it is launched: by shapes and the GPU alone.

Decoded weights in bf16 activations, by rows: ``gemv`` (int8, up to 4), ``few_rows`` (up to 32),
``many_rows_hopper`` (Hopper, one scale for each 128 inputs or each output), and the decoding GEMM
for all else, which the interpreter takes too: Gluon kernels have none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from .few_rows import KINDS as FEW_KINDS
from .grouped_gemm import decoded_step, path_of
from .launch import arch
from .many_rows_hopper import takes as many_takes
from .matrices import Matrices
from .plan import (
    GEMV,
    GEMV_ROWS,
    FewPlan,
    GemmPlan,
    GemvPlan,
    ManyPlan,
    gemm_plan,
    split_k,
    tuned_plan,
)

Plan = GemmPlan | GemvPlan | FewPlan | ManyPlan
FEW_ROWS = 32
"""Most rows for which each program reads all inputs itself."""
SPLIT_ROWS = 64
"""Most rows for which the decoding GEMM splits K."""
_H200_PROCESSORS = 132


def few_plan(M: int, N: int, processors: int) -> FewPlan:
    """Programs of 4 warps where that makes 4 a processor, else narrower and deeper ones."""
    if M > 8:
        return FewPlan(32, 4, 2) if N >= 96 * processors else FewPlan(32, 8)
    return FewPlan(32, 4) if N >= 128 * processors else FewPlan(16, 8)


def many_plan(M: int, N: int, steps: int, processors: int) -> ManyPlan:
    """Inputs of 64 to 256 rows a program; K in parts where there are few programs.

    Args:
        steps: of 128 inputs.
    """
    cols = 64 if M <= 64 else 128 if M <= 256 else 256
    plan = ManyPlan(cols, stages=3 if cols == 256 else 4)
    programs = triton.cdiv(M, cols) * triton.cdiv(N, 64)
    parts, room = 1, 3 * processors
    while parts < 8 and 2 * parts * programs <= room and steps >= 8 * parts:
        parts *= 2
    share = triton.cdiv(steps, parts)
    return replace(plan, split_k=triton.cdiv(steps, share))  # no part is empty


def choose_plan(weight: Matrices, M: int, device: torch.device, activations: str = "bf16") -> Plan:
    """What ``linear`` would launch for M rows."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else ""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if cuda else _H200_PROCESSORS
    )
    path = path_of(weight, activations == "fp8")
    N, K, kind, capability = weight.N, weight.K, weight.kind, arch(device)
    if path == "decoded":
        if M <= GEMV_ROWS.get(kind, 0):
            tuned = tuned_plan("gemv", kind, name, M, N, K)
            return GemvPlan(**tuned) if tuned else GEMV[kind]
        if M <= FEW_ROWS and kind in FEW_KINDS and capability >= (8, 0):
            tuned = tuned_plan("few", kind, name, M, N, K)
            return FewPlan(**tuned) if tuned else few_plan(M, N, processors)
        if capability[0] == 9 and many_takes(weight):
            tuned = tuned_plan("many", kind, name, M, N, K)
            steps = triton.cdiv(K, 128)
            return ManyPlan(**tuned) if tuned else many_plan(M, N, steps, processors)
    key = kind if path == "decoded" else path
    plan = gemm_plan("linear", key, capability, M, N, K, name)
    if path != "decoded" or M > SPLIT_ROWS or plan.split_k > 1:
        return plan
    programs = triton.cdiv(N, plan.block_n) * triton.cdiv(M, plan.block_m)
    return replace(plan, split_k=split_k(programs, K, processors, decoded_step(weight, plan)))
