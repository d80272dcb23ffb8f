"""The float truth of the routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import PykernelsError
from ..quant import Format, PackedExperts
from ..quant import activations as int8
from .activation import swiglu
from .linear import dequantize_fp8, quantize_fp8
from .norm import rms_norm


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    *,
    dtype: torch.dtype = torch.float32,
    h_dtype: torch.dtype | None = None,
    activations: str = "bf16",
    add: torch.Tensor | None = None,
    nudge: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])`` from the dequantized weights; what an
    expert does beside its products is ``experts.spec``'s to say.

    Args:
        x: [T, H], any float dtype.
        ids: int64 [T, topk]; those of no expert, or of one that has no slot, contribute nothing,
            as on the GPU (the CPU's kernels take -1 so, and refuse others).
        weights: [T, topk].
        experts: packed experts; they are unpacked one at a time.
        dtype: of all arithmetic (float64 for error bounds).
        h_dtype: what ``h = silu(gate) * up`` is rounded to before the down projection: None for no
            rounding, bfloat16 for what the CPU kernels are specified to do.
        activations: "bf16", or "int8" for what integer kernels are specified to do: x and h are
            rounded to bf16, then quantized as ``int8_kind`` of their matrices' format says; from
            there the products are exact but for ``dtype``. "fp8" likewise: E4M3, one scale a token
            and 128 inputs.
        add: [T, H] that joins the sum, such as the shared experts' output.
        nudge: what becomes of an expert's h before it is rounded (``testing.flips``).

    Returns:
        [T, H] in ``dtype``.

    Raises:
        PykernelsError: other ``activations``, or int8 ones and a format that has none.
    """
    fmt, down_fmt = experts.fmt, experts.down_fmt
    through = _inputs(down_fmt, activations, dtype)
    x, weights = _inputs(fmt, activations, dtype)(x), weights.to(dtype)
    y = torch.zeros_like(x) if add is None else add.to(dtype, copy=True)
    for expert in filter(experts.holds, ids.unique().tolist()):
        matrices = zip((fmt, fmt, down_fmt), experts.unpack(expert), strict=True)
        gate, up, down = (each.dequantize(w).to(dtype) for each, w in matrices)
        gate_bias, up_bias, down_bias = experts.biases(expert) or (None, None, None)
        tokens, ranks = torch.where(ids == expert)
        rows = x[tokens]
        h = swiglu(_affine(rows, gate, gate_bias), _affine(rows, up, up_bias), experts.spec)
        if nudge is not None:
            h = nudge(h)
        if h_dtype is not None:
            h = h.to(h_dtype).to(dtype)
        out = _affine(through(h), down, down_bias)
        y.index_add_(0, tokens, out * weights[tokens, ranks, None])
    return y


def _affine(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = rows @ matrix.T
    return y if bias is None else y + bias.to(y)


def _inputs(
    fmt: Format, activations: str, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What becomes of a matrix's inputs before they are multiplied, in ``dtype``."""
    if activations == "bf16":
        return lambda x: x.to(dtype)
    if activations == "fp8":
        return lambda x: dequantize_fp8(*quantize_fp8(x.to(torch.bfloat16)), dtype)
    if activations != "int8":
        raise PykernelsError(f"there are no {activations!r} activations", "Use bf16, int8 or fp8")
    kind = fmt.int8_kind
    if kind is None:
        raise PykernelsError(
            f"{fmt.name} weights are not multiplied with int8 activations",
            "Use bf16 activations, or an integer format",
        )
    return lambda x: int8.dequantize(int8.quantize(x.to(torch.bfloat16), kind), dtype)


def copy_rows(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies rows to where another device reads them, converted to what the targets hold.

    Args:
        sources, targets: [T, N], each pair with its own N; floats or integers.
    """
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def combine(
    residual: torch.Tensor,
    addends: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream behind a layer's experts, and the norm that the next layer begins with.

    Args:
        residual: [T, H].
        addends: of the same shape, added in this order: what shared experts, experts on the GPU and
            experts on the CPU (this layer's, and those deferred from the one before) gave.
        weight: [H], of the RMSNorm.
        eps: added to its mean.
        dtype: of the arithmetic and of the normed rows.

    Returns:
        The normed sum in ``dtype``, and the sum in the residual's dtype.
    """
    total = residual.to(dtype)
    for addend in addends:
        total = total + addend.to(residual.device, dtype)
    total = total.to(residual.dtype)
    return rms_norm(total, weight, eps, dtype=dtype)[0], total
