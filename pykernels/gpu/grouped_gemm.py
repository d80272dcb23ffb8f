"""Products of sorted tokens with their experts' matrices, or of all rows with one matrix."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import PykernelsError
from ..shapes import SortedSlots
from .blocks import block_bound
from .kernel_bf16 import gemm_bf16
from .kernel_decoded import gemm_decoded
from .kernel_fp8 import gemm_fp8
from .launch import arch
from .matrices import Matrices, fine, scale_every, scale_words
from .permute import permute
from .plan import fit_stages
from .plan_types import ExpertsPlan, GemmPlan, ManyPlan
from .quantize import NATIVE_FP8
from .unpacked import multiply_unpacked

Plan = GemmPlan | ExpertsPlan | ManyPlan
MOST_FINE_TOKENS = 8
"""Most rows of ``few_experts`` where each has four columns of a product, a scale in each."""


def path_of(stack: Matrices, fp8_inputs: bool) -> str:
    """Which kernel multiplies these matrices: see ``plan.PATHS``."""
    if fp8_inputs:
        return "fp8"
    return "bf16" if stack.kind == "bf16" else "decoded"


def multiply(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: Plan,
    *,
    x_scale: torch.Tensor | None = None,
    order: SortedSlots | None = None,
    table: torch.Tensor | None = None,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """out = x @ w.T by ``plan``; the caller has checked shapes and dtypes.

    Args:
        x: bfloat16 [rows, K], or E4M3 with ``x_scale`` float32 [rows, ceil(K / 128)]. By hand
            they are sorted rows, otherwise a gated product's are tokens.
        out: [S or M, N]; with ``plan.split_k`` above 1 float32 [split_k, M, N], parts of the sum.
        order: the rows' experts; None: one matrix for all rows.
        table: int32 [E]: where each expert's matrices lie in their stack; a negative one lies
            nowhere and its rows become zeros. None: expert e is number e.
        gated: the stack has two matrices an expert: out = silu(x @ gate.T) * (x @ up.T).
        bias: [N].
        out_scale: by hand and gated, float32 [S, ceil(N / 128)]: out is quantized to E4M3.

    Raises:
        PykernelsError: a plan whose kernel does not multiply these.
    """
    if isinstance(plan, ManyPlan):
        _many_rows(x, stack, out, plan, order, table, gated)
        return
    path = path_of(stack, x_scale is not None)
    if isinstance(plan, ExpertsPlan):
        if path != "decoded" or arch(x.device) < (8, 0):
            raise PykernelsError(
                "experts of few rows are multiplied in registers on a GPU, and decoded on the way",
                "Give a GemmPlan",
            )
        if plan.tokens > MOST_FINE_TOKENS and fine(stack.kind, stack.group):
            raise PykernelsError(
                f"a plan has tokens={plan.tokens} for {stack.kind} with a scale for 64 inputs or "
                "fewer",
                f"Use up to {MOST_FINE_TOKENS}",
            )
        from .few_experts import multiply_few_experts  # Gluon is slow to import

        multiply_few_experts(x, stack, out, plan, order=order, table=table, gated=gated, bias=bias)
        return
    if plan.unpack:
        if path != "decoded":
            raise PykernelsError("a plan unpacks what is not decoded", "Give one without unpack")
        multiply_unpacked(x, stack, out, plan, order, table, gated, bias)
        return
    if plan.by_hand:
        _by_hand(x, stack, out, plan, x_scale, order, table, gated, bias, out_scale)
        return
    if plan.split_k > 1 and (order is not None or path != "decoded"):
        raise PykernelsError(
            "only linears of decoded weights are split over K", "Give a plan with split_k=1"
        )
    mats = 2 if gated else 1
    plan = fit_stages(plan, arch(x.device), _step_bytes(stack, path, plan, mats))
    cols = plan.block_n // mats if path == "bf16" else plan.block_n
    n_blocks = triton.cdiv(stack.N, cols)
    if order is None:
        M, E, blocks = x.shape[0], 1, triton.cdiv(x.shape[0], plan.block_m)
    else:
        M, E = order.slots.shape[0], order.starts.shape[0] - 1
        blocks = block_bound(M, E, plan.block_m)
    if blocks == 0:
        return
    common: dict[str, Any] = {
        "order": order and order.slots,
        "starts": order and order.starts,
        "slots": table,
        "bias": bias,
        "M": M,
        "E": E,
        "N": stack.N,
        "K": stack.K,
        "TOPK": order.topk if order else 1,
        "N_BLOCKS": n_blocks,
        "GATED": gated,
        "GATHER": gated,
        "HAS_BIAS": bias is not None,
        "HAS_SLOTS": table is not None,
        "E_PADDED": 0 if order is None else triton.next_power_of_2(E),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "GROUP_M": plan.group_m,
        "STAGES": plan.stages,
        "num_warps": plan.warps,
    }
    if path == "decoded":
        _decoded(x, stack, out, plan, blocks * n_blocks, common)
        return
    block_k = plan.block_k if path == "bf16" else 128
    # Descriptors want 16-byte addresses; tensors that begin elsewhere are read through pointers.
    copied = gated and plan.copy and order is not None
    tma = {
        "W_TMA": plan.tma and stack.data.data_ptr() % 16 == 0,
        "X_TMA": plan.tma and (copied or not gated and x.data_ptr() % 16 == 0),
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
        source = permute(x, order) if copied and order else x
        rows = TensorDescriptor.from_tensor(source, [plan.block_m, block_k])
    grid = (blocks * n_blocks,)
    if path == "bf16":
        gemm_bf16[grid](rows, w, out, **common, **tma, BLOCK_K=block_k)
    else:
        gemm_fp8[grid](rows, x_scale, w, stack.scale, out, **common, **tma, NATIVE=native)


def _by_hand(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    x_scale: torch.Tensor | None,
    order: SortedSlots | None,
    table: torch.Tensor | None,
    gated: bool,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:
    matched = stack.kind == ("bf16" if x_scale is None else "fp8")
    known = x_scale is not None or order is not None
    if not (matched and known and x.data_ptr() % 16 == 0 and by_hand_takes(stack, x.device)):
        raise PykernelsError(
            "the kernels written out for Hopper multiply aligned E4M3, and experts of aligned "
            "bfloat16, by rows of the same, there alone",
            "Give a plan without by_hand",
        )
    if x.shape[0] == 0:
        return
    if x_scale is None and order is not None:
        from .gemm_bf16_hopper import multiply_bf16_by_hand  # Gluon is slow to import

        multiply_bf16_by_hand(x, stack, out, order, table, gated=gated, group_m=plan.group_m)
    elif x_scale is not None and order is None:
        from .linear_fp8_hopper import multiply_rows_by_hand

        multiply_rows_by_hand(x, x_scale, stack, out, bias, plan.group_m)
    elif x_scale is not None and order is not None:
        from .gemm_fp8_hopper import multiply_by_hand

        multiply_by_hand(
            x, x_scale, stack, out, order, table,
            gated=gated, group_m=plan.group_m, out_scale=out_scale,
        )  # fmt: skip


def _many_rows(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: ManyPlan,
    order: SortedSlots | None,
    table: torch.Tensor | None,
    gated: bool,
) -> None:
    shared = plan.split_k > 1 or plan.programs
    if order is None or shared or not many_rows_takes(stack, x.device):
        raise PykernelsError(
            "many_rows_hopper multiplies experts of integers and K-quants on Hopper, K in one part",
            "Give a GemmPlan",
        )
    from .many_rows_hopper import multiply_experts_rows  # Gluon is slow to import

    if order.slots.shape[0]:
        multiply_experts_rows(x, stack, out, order, table, plan, gated)


def many_rows_takes(stack: Matrices, device: torch.device) -> bool:
    """Whether ``many_rows_hopper`` multiplies these weights there."""
    if arch(device)[0] != 9:
        return False
    from .many_rows_hopper import EXPERT_KINDS, takes

    return stack.kind in EXPERT_KINDS and takes(stack)


def by_hand_takes(stack: Matrices, device: torch.device) -> bool:
    """Whether ``GemmPlan.by_hand`` can run: Hopper, weights where descriptors can begin."""
    there = stack.kind in ("bf16", "fp8") and arch(device)[0] == 9
    return there and stack.data.data_ptr() % 16 == 0


def _decoded(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    programs: int,
    common: dict[str, Any],
) -> None:
    data = stack.data.view(torch.uint8)
    block_k = decoded_step(stack, plan)
    steps = triton.cdiv(stack.K, block_k)
    gemm_decoded[(programs, plan.split_k)](
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
    step = decoded_step(stack, plan)
    weights = stack.nbytes * step // stack.K // stack.N  # scales included
    return 2 * step * plan.block_m + mats * plan.block_n * (weights + 4)


def decoded_step(stack: Matrices, plan: GemmPlan) -> int:
    """Inputs of one step: whole superblocks of K-quants, and no step beyond K."""
    if stack.kind == "q4_k":
        return 256
    step = max(plan.block_k, 128 if stack.kind == "q6_k" else 64)
    while stack.K % step:
        step //= 2
    return step
