"""The float truth of linears with quantized weights, and of E4M3 activations."""

from __future__ import annotations

import torch

from ..quant import Format, Weight
from ..shapes import SortedPairs
from .kv_write import quantize_rows
from .permute import permute

GROUP = 128


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    fmt: Format,
    activations: str = "bf16",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``x @ w.T + bias`` from the dequantized weight, in ``dtype``.

    Args:
        x: [M, K], any float dtype.
        weight: [N, K] in ``fmt``.
        bias: [N].
        fmt: of the weight, which does not know it; the GPU's layout does.
        activations: "bf16" for x as it is, "fp8" for what E4M3 kernels make of it first.
        dtype: of the products, their sums and the result.

    Returns:
        [M, N] in ``dtype``.
    """
    if activations == "fp8":
        x = dequantize_fp8(*quantize_fp8(x))
    y = x.to(dtype) @ fmt.dequantize(weight).to(dtype).T
    return y if bias is None else y + bias.to(dtype)


def per_head_linear(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``out[t, g] = weight[g] @ x[t, g]`` (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

    Args:
        x: [T, G, K], for each head its part of a query, or its sum of latents.
        weight: [G, N, K].
        dtype: of the arithmetic and of the result.

    Returns:
        [T, G, N].
    """
    return torch.einsum("tgk,gnk->tgn", x.to(dtype), weight.to(dtype))


def quantize_fp8(
    x: torch.Tensor, order: SortedPairs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K] -> (float8_e4m3fn [R, K], float32 scales [R, ceil(K / 128)]).

    A scale is the largest magnitude of a row's 128 inputs / 448 (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2), 1 if that is 0; NaN stays NaN, the numbers beside it stay what they are.

    Args:
        order: of R tokens; the results then have R * topk rows, each sorted slot's token.
    """
    if order is not None:
        x = permute(x, order)
    R, K = x.shape
    whole = torch.nn.functional.pad(x.float(), (0, -K % GROUP)).view(R, -1, GROUP)
    codes, scale = quantize_rows(whole)
    return codes.view(R, -1)[:, :K].contiguous(), scale


def dequantize_fp8(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """The values [R, K] that those codes and scales stand for."""
    R, K = codes.shape
    whole = torch.nn.functional.pad(codes.to(dtype), (0, -K % GROUP)).view(R, -1, GROUP)
    return (whole * scale.to(dtype)[..., None]).view(R, -1)[:, :K]
