"""What goes from a GPU to the experts on the CPU and back, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .norm import rms_norm


def submit(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies activations and their routing to where the CPU reads them.

    Args:
        x: [T, H].
        ids: int [T, topk]; -1: not on the CPU.
        weights: [T, topk].
        out: bf16 [T, H], int32 [T, topk] and float32 [T, topk] in the host's memory.

    Returns:
        ``out``.
    """
    for value, to in zip((x, ids, weights), out, strict=True):
        to.copy_(value)
    return out


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
        eps: beside its mean.
        dtype: of the arithmetic and of the normed rows.

    Returns:
        The normed sum in ``dtype``, and the sum in the residual's dtype.
    """
    total = residual.to(dtype)
    for addend in addends:
        total = total + addend.to(residual.device, dtype)
    total = total.to(residual.dtype)
    return rms_norm(total, weight, eps, dtype=dtype)[0], total
