"""Gates of heads and of tokens in plain torch.

Source: transformers' ``Qwen3NextRMSNormGated``, ``Qwen3NextAttention`` and
``Qwen3NextSparseMoeBlock``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..norm import rms_norm


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * silu(gate)`` over the last dimension.

    Args:
        x: [T, heads, D]; each head is normed by itself.
        gate: [T, heads, D].
        weight: [D].
        eps: added to the mean.
        dtype: of the arithmetic and of the result.

    Returns:
        [T, heads, D] in ``dtype``.
    """
    return rms_norm(x, weight, eps, dtype=dtype)[0] * F.silu(gate.to(dtype))


def sigmoid_mul(
    x: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``x * sigmoid(gate)``: the gate of attention's heads, or of a shared expert.

    Args:
        x: [T, heads, D].
        gate: [T, heads, D], or [T, heads, 1] of one number a head.
        dtype: of the arithmetic and of the result.

    Returns:
        [T, heads, D] in ``dtype``.
    """
    return x.to(dtype) * torch.sigmoid(gate.to(dtype))
