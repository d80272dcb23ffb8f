"""Products of sorted tokens with their experts' matrices, or of all rows with one matrix.

Products of many rows with K-quants that are decoded to bfloat16 in device memory beforehand.

Each block of rows decodes the weights again. From some number of rows on it pays to write bfloat16
once and to multiply that: the values are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import PykernelsError
from ...shapes import SortedSlots
from ..common.dequant import decode_pair
from ..common.launch import arch
from ..moe.permute import permute
from ..plans.gemm import DequantPlan, GemmPlan, SkinnyExpertsPlan
from ..plans.grouped import fit_stages
from ..quantize import NATIVE_FP8
from .tiles import block_bound
from .triton_kernels import gemm_bf16, gemm_dequant, gemm_fp8, row_pointers
from .weights import Matrices, fine, scale_every, scale_words

pass

Plan = GemmPlan | SkinnyExpertsPlan | DequantPlan
MOST_FINE_TOKENS = 8
"""Most rows of ``skinny_experts`` where each has four columns of a product, a scale in each."""


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
    if isinstance(plan, DequantPlan):
        _many_rows(x, stack, out, plan, order, table, gated)
        return
    path = path_of(stack, x_scale is not None)
    if isinstance(plan, SkinnyExpertsPlan):
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
        from .skinny_experts import multiply_skinny_experts  # Gluon is slow to import

        multiply_skinny_experts(
            x, stack, out, plan, order=order, table=table, gated=gated, bias=bias
        )
        return
    if plan.unpack:
        if path != "decoded":
            raise PykernelsError("a plan unpacks what is not decoded", "Give one without unpack")
        multiply_unpacked(x, stack, out, plan, order, table, gated, bias)
        return
    if plan.warp_specialized:
        _warp_specialized(x, stack, out, plan, x_scale, order, table, gated, bias, out_scale)
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


def _warp_specialized(
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
    if not (
        matched and known and x.data_ptr() % 16 == 0 and warp_specialized_takes(stack, x.device)
    ):
        raise PykernelsError(
            "the kernels written out for Hopper multiply aligned E4M3, and experts of aligned "
            "bfloat16, by rows of the same, there alone",
            "Give a plan without warp_specialized",
        )
    if x.shape[0] == 0:
        return
    if x_scale is None and order is not None:
        from .hopper.bf16 import multiply_bf16  # Gluon is slow to import

        multiply_bf16(x, stack, out, order, table, gated=gated, group_m=plan.group_m)
    elif x_scale is not None and order is None:
        from .hopper.linear_fp8 import multiply_rows

        multiply_rows(x, x_scale, stack, out, bias, plan.group_m)
    elif x_scale is not None and order is not None:
        from .hopper.fp8 import multiply_fp8

        multiply_fp8(
            x, x_scale, stack, out, order, table,
            gated=gated, group_m=plan.group_m, out_scale=out_scale,
        )  # fmt: skip


def _many_rows(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: DequantPlan,
    order: SortedSlots | None,
    table: torch.Tensor | None,
    gated: bool,
) -> None:
    shared = plan.split_k > 1 or plan.programs
    if order is None or shared or not dequant_takes(stack, x.device):
        raise PykernelsError(
            "dequant_gemm multiplies experts of integers and K-quants on Hopper, K in one part",
            "Give a GemmPlan",
        )
    from .hopper.dequant import multiply_dequant_experts  # Gluon is slow to import

    if order.slots.shape[0]:
        multiply_dequant_experts(x, stack, out, order, table, plan, gated)


def dequant_takes(stack: Matrices, device: torch.device) -> bool:
    """Whether ``dequant_gemm`` multiplies these weights there."""
    if arch(device)[0] != 9:
        return False
    from .hopper.dequant import EXPERT_KINDS, takes

    return stack.kind in EXPERT_KINDS and takes(stack)


def warp_specialized_takes(stack: Matrices, device: torch.device) -> bool:
    """Whether ``GemmPlan.warp_specialized`` can run: Hopper, weights where descriptors can
    begin."""
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
    gemm_dequant[(programs, plan.split_k)](
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


if TYPE_CHECKING:
    from collections.abc import Iterator

SCRATCH = 256 << 20
"""Most bytes of decoded weights at a time, or one expert's."""
_ROWS, _INPUTS = 32, 512


@triton.jit(do_not_specialize=["first"])
def unpack_kernel(
    w, w_scale, out, starts, slots, first, COUNT, N, K, ROW_BYTES, K_BLOCKS,
    MATS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """out [.., COUNT, K] = the matrices of experts from ``first`` on, or with no ``starts`` rows
    ``first`` .. of one matrix. Experts without rows or slot are passed over."""
    i = tl.program_id(1)
    own = tl.program_id(0) // K_BLOCKS * ROWS + tl.arange(0, ROWS)
    k0 = tl.program_id(0) % K_BLOCKS * INPUTS
    if starts is None:
        wanted, matrix, n = True, i, own + first
    else:
        expert = first + i // MATS
        wanted = tl.load(starts + expert) < tl.load(starts + expert + 1)
        slot = expert
        if slots is not None:
            slot = tl.load(slots + expert)
        wanted, matrix, n = wanted & (slot >= 0), slot * MATS + i % MATS, own
    if wanted:
        rows, scales = row_pointers(w, w_scale, matrix, n, N, K, ROW_BYTES, KIND, GROUP)
        there = own < COUNT
        to = out + (i.to(tl.int64) * COUNT + own)[:, None] * K + tl.arange(0, 32)[None, :]
        for k1 in tl.range(k0, tl.minimum(k0 + INPUTS, K), 256):
            for pair in tl.static_range(4):
                k = k1 + pair * 64
                if k < K:
                    a, b = decode_pair(rows, scales, there, k, N, K, KIND, GROUP, pair, NATIVE)
                    tl.store(to + k, a, mask=there[:, None])
                    tl.store(to + (k + 32), b, mask=there[:, None])


def _unpack(
    stack: Matrices, out: torch.Tensor, first: int, order: SortedSlots | None,
    table: torch.Tensor | None, mats: int,
) -> Matrices:  # fmt: skip
    count, rows, K = out.shape
    data = stack.data.view(torch.uint8)
    k_blocks = triton.cdiv(K, _INPUTS)
    unpack_kernel[(triton.cdiv(rows, _ROWS) * k_blocks, count)](
        data, scale_words(stack), out, order and order.starts, table, first, rows, stack.N, K,
        data.shape[-1], k_blocks, MATS=mats, KIND=stack.kind,
        GROUP=scale_every(stack),
        NATIVE=arch(out.device) >= NATIVE_FP8, ROWS=_ROWS, INPUTS=_INPUTS, num_warps=4,
    )  # fmt: skip
    return Matrices("bf16", rows, K, 0, out)


def _runs(total: int, size: int, limit: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of runs of at most ``limit`` bytes; starts are multiples of four."""
    count = max(1, limit // size)
    count = min(total, count - count % 4 if count > 4 else count)
    for first in range(0, total, count):
        yield first, min(count, total - first)


def multiply_unpacked(
    x: torch.Tensor,
    stack: Matrices,
    out: torch.Tensor,
    plan: GemmPlan,
    order: SortedSlots | None,
    table: torch.Tensor | None,
    gated: bool,
    bias: torch.Tensor | None,
    limit: int = SCRATCH,
) -> None:
    """See ``grouped_gemm.multiply``; ``plan`` is for bfloat16 weights.

    Args:
        limit: bytes of decoded weights at a time, if not less than one expert's or 256 rows'.
    """
    pass

    plan, mats = replace(plan, unpack=False), 2 if gated else 1
    if order is None:
        for n, rows in _runs(stack.N, 2 * stack.K, max(limit, 512 * stack.K)):
            decoded = _unpack(stack, _scratch(x, 1, rows, stack.K), n, None, None, 1)
            whole = rows == stack.N
            part = out if whole else torch.empty_like(out[:, :rows])
            multiply(x, decoded, part, plan, bias=None if bias is None else bias[n : n + rows])
            if not whole:
                out[:, n : n + rows] = part
        return
    E = order.starts.shape[0] - 1
    for e, count in _runs(E, 2 * mats * stack.N * stack.K, limit):
        scratch = _scratch(x, mats * count, stack.N, stack.K)
        decoded = _unpack(stack, scratch, e, order, table, mats)
        here = None
        if table is not None:
            own = torch.arange(count, dtype=torch.int32, device=x.device)
            here = torch.where(table[e : e + count] < 0, -1, own)
        some = replace(order, starts=order.starts[e : e + count + 1])
        multiply(x, decoded, out, plan, order=some, table=here, gated=gated)


def _scratch(x: torch.Tensor, count: int, N: int, K: int) -> torch.Tensor:
    return torch.empty(count, N, K, dtype=torch.bfloat16, device=x.device)
