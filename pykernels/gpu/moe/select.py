"""Which kernel multiplies a layer's experts, and how it is launched: by shapes and the GPU alone.

Weights that are decoded on the way, by rows of an expert on average: ``few_experts`` (a few),
``many_rows_hopper`` (Hopper, integers and K-quants), and for all else the decoding GEMM, K-quants
unpacked first where rows are many.
"""

from __future__ import annotations

import torch

from ..common.launch import arch
from ..gemm.grouped import Plan, by_hand_takes, many_rows_takes, path_of
from ..gemm.weights import Matrices, fine
from ..plans.gemm import ExpertsPlan, GemmPlan, ManyPlan
from ..plans.grouped import UNPACKED, gemm_plan
from ..plans.tuned import tuned_plan


def most_few(kind: str, group: int, many: bool) -> int:
    """Most rows an expert, on average, for ``few_experts``.

    With a scale for at most 64 inputs its time grows with the rows. That of ``many_rows_hopper``
    does not up to 16: it begins sooner than the decoding GEMM would.

    Args:
        many: whether ``many_rows_hopper`` could multiply them too.
    """
    if not fine(kind, group):
        return 6 if many else 8
    return 4 if not many else 2 if kind in UNPACKED else 3


def few_plan(kind: str, group: int, rows: float, K: int) -> ExpertsPlan:
    """The fastest measured at experts of 7168 x 2048 on Hopper, 1 to 32 tokens.

    A warp wants some steps of its own: the fewer inputs, the fewer warps.

    Args:
        rows: of an expert, on average.
        group: of the weights.
    """
    many = K >= 4096
    tokens = 8 if not fine(kind, group) else 2 if rows <= 2 else 4
    if kind == "q4_k":
        return ExpertsPlan(16, 2, tokens) if many else ExpertsPlan(16, 1, tokens, ahead=2)
    tall = many or kind == "int4"
    return ExpertsPlan(
        32 if tall else 16, 4 if many else 2, tokens, chunks=2 if kind in ("int8", "fp8") else 1
    )


def many_plan(kind: str, rows: float) -> ManyPlan:
    """Of ``many_rows_hopper`` for this many rows an expert, on average."""
    cols = next((cols for cols in (16, 32, 64, 128) if rows <= cols), 256)
    if cols == 64 and kind in UNPACKED:
        return ManyPlan(cols, word_stages=3)
    return ManyPlan(cols, stages=4 if cols <= 64 else 3)


def choose_plan(
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
    many = path == "decoded" and many_rows_takes(stack, device)
    most = most_few(stack.kind, stack.group, many)
    if path == "decoded" and rows <= most and arch(device) >= (8, 0):
        tuned = tuned_plan(f"few_{op}", stack.kind, name, rows, stack.N, stack.K)
        if tuned:
            return ExpertsPlan(**tuned)
        return few_plan(stack.kind, stack.group, rows, stack.K)
    if many:
        tuned = tuned_plan(op, key, name, rows, stack.N, stack.K)
        if tuned:
            return ManyPlan(**tuned) if "cols" in tuned else GemmPlan(**tuned)
        return many_plan(stack.kind, rows)
    # fp8 weights have one key on either path; by hand none are decoded.
    by_hand = path != "decoded" and aligned and by_hand_takes(stack, device)
    return gemm_plan(op, key, arch(device), rows, stack.N, stack.K, name, by_hand)
