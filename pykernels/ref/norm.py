"""RMSNorm in plain torch."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv 1910.07467).

    Args:
        x: [..., H].
        weight: [H]; of a zero-centred norm (Qwen3-Next), which has ``1 + weight``, that sum, made
            in float32 when it is loaded.
        eps: added to the mean.
        residual: [..., H], added to ``x`` first; the sum is rounded to x's dtype, as it is stored.
        dtype: of the arithmetic and of the result.

    Returns:
        The normed sum in ``dtype``, and the sum in x's dtype (None without ``residual``).
    """
    total = None
    if residual is not None:
        x = total = (x.to(dtype) + residual.to(dtype)).to(x.dtype)
    x = x.to(dtype)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype), total


def post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``(residual + rms_norm(x)) * scale``: a branch's result, normed before it joins (Gemma).

    Args:
        x: [..., H]; ``residual``: the same, or None for zeros.
        weight: [H]; ``scale``: [1], or None for 1.
        eps: added to the mean.
        dtype: of the arithmetic and of the result.
    """
    out = rms_norm(x, weight, eps, dtype=dtype)[0]
    out = out if residual is None else residual.to(dtype) + out
    return out if scale is None else out * scale.to(dtype)


def softcap(x: torch.Tensor, cap: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``cap * tanh(x / cap)`` in ``dtype``, of any shape (Gemma 2, arXiv 2408.00118, 2)."""
    return cap * torch.tanh(x.to(dtype) / cap)
