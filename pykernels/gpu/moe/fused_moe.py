"""The routed experts of a layer on the GPU: gate and up, down, the sum over a token's experts.

Sort, two grouped products, weighted sum: no launch depends on the routing but by what it reads, so
a captured graph replays with other tokens and other experts.
"""

from __future__ import annotations

import torch
import triton

from ...errors import PykernelsError
from ...quant import Format
from ...shapes import MoEShape, SortedPairs
from ..common.launch import check_device
from ..common.launch import supports as device_supports
from ..common.strides import check_out
from ..gemm.grouped import multiply, wants_sorted_rows
from ..gemm.select import select_experts
from ..gemm.weights import Matrices, supports_format
from ..plans.gemm import ExpertsPlan, GemmPlan
from ..quantize import GROUP, launch_quantize
from .experts import GpuExperts
from .permute import check_sum, launch_permute, launch_unpermute, sort_pairs

ACTIVATIONS = ("bf16", "fp8")


def supports(
    shape: MoEShape, fmt: Format, device: torch.device, activations: str = "bf16"
) -> str | None:
    """None if ``moe_ffn`` runs these experts there, or the reason why not."""
    return device_supports(device) or _supports_formats(fmt, shape.H, shape.I, activations)


def _supports_formats(fmt: Format, H: int, I: int, activations: str) -> str | None:  # noqa: E741
    if activations not in ACTIVATIONS:
        return f"there are no {activations!r} activations (only {', '.join(ACTIVATIONS)})"
    if activations == "fp8" and fmt.name != "fp8":
        return f"{fmt.name} weights are not multiplied with fp8 activations"
    return supports_format(fmt, H) or supports_format(fmt, I)


def gate_up(
    x: torch.Tensor,
    experts: GpuExperts,
    order: SortedPairs,
    *,
    activations: str = "bf16",
    plan: ExpertsPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` of each sorted slot's token, or what ``experts.spec`` makes
    of both: bfloat16 [S, I].

    Args:
        x: bfloat16 [T, H].
        order: of T tokens; rows of slots that have no expert are not written.
    """
    _check_tokens(x, experts, order, activations)
    out = check_out(out, x, order.pairs.shape[0], experts.I, dtype=torch.bfloat16)
    plan = plan or _plan("gate_up", experts.gate_up, experts, order, activations, x)
    _gate_up(x, experts, order, activations, plan, out)
    return out


def gate_up_quantized(
    x: torch.Tensor, experts: GpuExperts, order: SortedPairs, *, plan: ExpertsPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_fp8`` of ``gate_up`` with fp8 activations, bit for bit; one launch where it can.

    Returns:
        (float8_e4m3fn [S, I], float32 scales [S, ceil(I / 128)]): what ``down`` takes.
    """
    _check_tokens(x, experts, order, "fp8")
    plan = plan or _plan("gate_up", experts.gate_up, experts, order, "fp8", x)
    return _gate_up_quantized(x, experts, order, plan)


def down(
    h: torch.Tensor,
    experts: GpuExperts,
    order: SortedPairs,
    *,
    activations: str = "bf16",
    plan: ExpertsPlan | None = None,
    out: torch.Tensor | None = None,
    h_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``h @ down.T``, plus a bias, of each sorted slot: bfloat16 [S, H], sorted; ``unpermute``
    weights and adds.

    Args:
        h: bfloat16 [S, I], sorted.
        h_scale: of ``gate_up_quantized``, whose h is E4M3.
    """
    S = order.pairs.shape[0]
    _check(h, experts.down, experts, order, activations, h_scale)
    if S != h.shape[0]:
        raise PykernelsError(f"{h.shape[0]} rows in an order of {S}", "Give gate_up's result")
    out = check_out(out, h, S, experts.H, dtype=torch.bfloat16)
    if activations == "fp8" and h_scale is None:
        h, h_scale = launch_quantize(h)
    plan = plan or _plan("down", experts.down, experts, order, activations, h)
    _down(h, h_scale, experts, order, plan, out)
    return out


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GpuExperts,
    *,
    activations: str = "bf16",
    add: torch.Tensor | None = None,
    plans: tuple[ExpertsPlan, ExpertsPlan] | None = None,
    out: torch.Tensor | None = None,
    order: SortedPairs | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])``.

    Args:
        x: bfloat16 [T, H].
        ids: int32 or int64 [T, topk]; those outside ``0..E-1`` contribute nothing.
        weights: float32 [T, topk].
        activations: "bf16"; "fp8" (fp8 weights only) multiplies E4M3 inputs, which are quantized
            for each token and 128 inputs, on E4M3 tensor cores where the GPU has them.
        add: [T, H] that joins the sum, such as the shared experts' output.
        plans: of gate_up and down, in place of the table's.
        order: ``sort_pairs`` of the ids, or ``route``'s; None: they are sorted here.

    Returns:
        bfloat16 [T, H]: products are added in float32; h, and each expert's output, are rounded
        to bfloat16 once.

    Raises:
        PykernelsError: tensors on several devices, of other shapes or dtypes, or a GPU or format
            that has no kernel.
    """
    order = sort_pairs(ids, experts.E) if order is None else order
    _check_tokens(x, experts, order, activations)
    check_sum(order, weights, add, experts.H)
    out = check_out(out, x, x.shape[0], experts.H, dtype=None if out is not None else x.dtype)
    S, h_scale = order.pairs.shape[0], None
    first, second = plans or (None, None)
    first = first or _plan("gate_up", experts.gate_up, experts, order, activations, x)
    if activations == "fp8":
        h, h_scale = _gate_up_quantized(x, experts, order, first)
    else:
        h = x.new_empty(S, experts.I)
        _gate_up(x, experts, order, activations, first, h)
    second = second or _plan("down", experts.down, experts, order, activations, h)
    y = x.new_empty(S, experts.H)
    _down(h, h_scale, experts, order, second, y)
    launch_unpermute(y, order, weights, add, out)
    return out


def _plan(
    op: str,
    stack: Matrices,
    experts: GpuExperts,
    order: SortedPairs,
    activations: str,
    rows: torch.Tensor,
) -> ExpertsPlan:
    """By the rows that an expert has on average: nothing here knows the routing."""
    S = order.pairs.shape[0]
    each = S / min(experts.E, max(S, 1))
    aligned = op == "gate_up" or rows.data_ptr() % 16 == 0
    return select_experts(op, stack, activations, each, rows.device, aligned, experts.spec)


def _gate_up(
    x: torch.Tensor,
    experts: GpuExperts,
    order: SortedPairs,
    activations: str,
    plan: ExpertsPlan,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
) -> None:
    """``gate_up`` of what has been checked; rows are gathered on the way, or before."""
    stack, fp8 = experts.gate_up, activations == "fp8"
    in_order = wants_sorted_rows(plan, stack, fp8)
    rows, scale = x, None
    if fp8:
        rows, scale = launch_quantize(x, order if in_order else None)
    elif in_order:
        rows = x.new_empty(order.pairs.shape[0], experts.H)
        launch_permute(x, order, rows)
    multiply(
        rows,
        stack,
        out,
        plan,
        x_scale=scale,
        order=order,
        gated=True,
        gather=not in_order,
        bias=experts.gate_up_bias,
        out_scale=out_scale,
        spec=experts.spec,
    )


def _gate_up_quantized(
    x: torch.Tensor, experts: GpuExperts, order: SortedPairs, plan: ExpertsPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    S, I, device = order.pairs.shape[0], experts.I, x.device  # noqa: E741
    if not isinstance(plan, GemmPlan) or not plan.warp_specialized:
        h = x.new_empty(S, I)
        _gate_up(x, experts, order, "fp8", plan, h)
        return launch_quantize(h)
    out = torch.empty(S, I, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(S, triton.cdiv(I, GROUP), dtype=torch.float32, device=device)
    _gate_up(x, experts, order, "fp8", plan, out, scale)
    return out, scale


def _down(
    h: torch.Tensor,
    h_scale: torch.Tensor | None,
    experts: GpuExperts,
    order: SortedPairs,
    plan: ExpertsPlan,
    out: torch.Tensor,
) -> None:
    multiply(
        h,
        experts.down,
        out,
        plan,
        x_scale=h_scale,
        order=order,
        bias=experts.down_bias,
    )


def _check_tokens(
    x: torch.Tensor, experts: GpuExperts, order: SortedPairs, activations: str
) -> None:
    """Raises PykernelsError unless a kernel multiplies these tokens, and the order is theirs."""
    _check(x, experts.gate_up, experts, order, activations)
    S = order.pairs.shape[0]
    if S != x.shape[0] * order.topk:
        raise PykernelsError(
            f"an order of {S} slots, top-{order.topk}, for {x.shape[0]} tokens", "Sort these tokens"
        )


def _check(
    x: torch.Tensor,
    stack: Matrices,
    experts: GpuExperts,
    order: SortedPairs,
    activations: str,
    scale: torch.Tensor | None = None,
) -> None:
    """Raises PykernelsError unless a kernel multiplies these; a scale comes with E4M3 inputs."""
    parts = (experts.gate_up_bias, experts.down_bias)
    given = (part for part in parts if part is not None)
    check_device(x, stack.data, order.pairs, *given)
    dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != stack.K or not x.is_contiguous():
        raise PykernelsError(
            f"the inputs are {x.dtype} {tuple(x.shape)}",
            f"Give contiguous {str(dtype).removeprefix('torch.')} [.., {stack.K}]",
        )
    if scale is not None and (
        activations != "fp8"
        or scale.shape != (x.shape[0], triton.cdiv(stack.K, GROUP))
        or scale.dtype != torch.float32
        or not scale.is_contiguous()
        or scale.device != x.device
    ):
        raise PykernelsError(
            f"scales {scale.dtype} {tuple(scale.shape)} of inputs with {activations} activations",
            "Give gate_up_quantized's, and fp8 activations",
        )
    if order.starts.shape != (experts.E + 1,):
        raise PykernelsError(
            f"an order of {order.starts.shape[0] - 1} experts for {experts.E}", "Sort for these"
        )
    if reason := _supports_formats(experts.fmt, experts.H, experts.I, activations):
        raise PykernelsError(f"no GPU kernel multiplies these experts: {reason}", "See supports()")
