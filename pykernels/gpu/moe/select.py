"""Which kernel multiplies a layer's experts, and how it is launched: by shapes and the GPU alone.

Weights that are decoded on the way, by rows of an expert on average: ``skinny_experts`` (a few),
``dequant_gemm`` (Hopper, integers and K-quants), and for all else the decoding GEMM, K-quants
unpacked first where rows are many.
"""

from __future__ import annotations

import torch

from ..common.launch import arch
from ..gemm.grouped import Plan, dequant_takes, path_of, warp_specialized_takes
from ..gemm.weights import Matrices, fine
from ..plans.gemm import DequantPlan, GemmPlan, SkinnyExpertsPlan
from ..plans.grouped import UNPACKED, gemm_plan
from ..plans.tuned import tuned_plan


def most_skinny_rows(kind: str, group: int, many: bool) -> int:
    """Most rows an expert, on average, for ``skinny_experts``.

    With a scale for at most 64 inputs its time grows with the rows. That of ``dequant_gemm``
    does not up to 16: it begins sooner than the decoding GEMM would.

    Args:
        many: whether ``dequant_gemm`` could multiply them too.
    """
    if not fine(kind, group):
        return 6 if many else 8
    return 4 if not many else 2 if kind in UNPACKED else 3


def skinny_plan(kind: str, group: int, rows: float, K: int) -> SkinnyExpertsPlan:
    """The fastest measured at experts of 7168 x 2048 on Hopper, 1 to 32 tokens.

    A warp wants some steps of its own: the fewer inputs, the fewer warps.

    Args:
        rows: of an expert, on average.
        group: of the weights.
    """
    many = K >= 4096
    tokens = 8 if not fine(kind, group) else 2 if rows <= 2 else 4
    if kind == "q4_k":
        return (
            SkinnyExpertsPlan(16, 2, tokens) if many else SkinnyExpertsPlan(16, 1, tokens, ahead=2)
        )
    tall = many or kind == "int4"
    return SkinnyExpertsPlan(
        32 if tall else 16, 4 if many else 2, tokens, chunks=2 if kind in ("int8", "fp8") else 1
    )


def dequant_plan(kind: str, rows: float) -> DequantPlan:
    """Of ``dequant_gemm`` for this many rows an expert, on average."""
    cols = next((cols for cols in (16, 32, 64, 128) if rows <= cols), 256)
    if cols == 64 and kind in UNPACKED:
        return DequantPlan(cols, word_stages=3)
    return DequantPlan(cols, stages=4 if cols <= 64 else 3)


def select(
    op: str,
    stack: Matrices,
    activations: str,
    S: int,
    E: int,
    device: torch.device,
    aligned: bool = True,
) -> Plan:
    """The plan of a layer's product, a tuned one if this GPU has it.

    Args:
        op: "gate_up" or "down".
        activations: "bf16" or "fp8".
        S: sorted slots.
        E: experts.
        aligned: whether the rows that are multiplied begin at a multiple of 16 bytes.
    """
    path = path_of(stack, activations == "fp8")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    key = stack.kind if path == "decoded" else path
    rows = S / min(E, max(S, 1))
    many = path == "decoded" and dequant_takes(stack, device)
    most = most_skinny_rows(stack.kind, stack.group, many)
    if path == "decoded" and rows <= most and arch(device) >= (8, 0):
        tuned = tuned_plan(f"few_{op}", stack.kind, name, rows, stack.N, stack.K)
        if tuned:
            return SkinnyExpertsPlan(**tuned)
        return skinny_plan(stack.kind, stack.group, rows, stack.K)
    if many:
        tuned = tuned_plan(op, key, name, rows, stack.N, stack.K)
        if tuned:
            return DequantPlan(**tuned) if "cols" in tuned else GemmPlan(**tuned)
        return dequant_plan(stack.kind, rows)
    # fp8 weights have one key on either path; by hand none are decoded.
    warp_specialized = path != "decoded" and aligned and warp_specialized_takes(stack, device)
    return gemm_plan(op, key, arch(device), rows, stack.N, stack.K, name, warp_specialized)
