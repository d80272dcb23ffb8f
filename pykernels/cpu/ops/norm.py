"""RMSNorm on the calling thread."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import PykernelsError
from ..norm import ADD, LAYOUT, NORM, make_norm
from .checks import floats, number
from .serial import Record, counted, run_tasks


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv 1910.07467), in
    float32, on the calling thread alone.

    Args:
        x: float32, bfloat16 or float16 [..., H].
        weight: floats [H].
        eps: beside the mean.
        residual: floats [..., H], added to ``x`` first.

    Returns:
        The normed sum as bfloat16, which is what matrices read, and the sum in x's dtype (None
        without ``residual``). The norm is of the sum before that is rounded.

    Raises:
        PykernelsError: dtypes or shapes that do not fit.
    """
    weight = floats("weight", weight, "H")
    H, shape, dtype = weight.shape[0], getattr(x, "shape", ()), getattr(x, "dtype", None)
    inner = [f"n{i}" for i in range(len(shape) - 1)]
    x = floats("x", x, *inner, H)
    if residual is not None:
        residual = floats("residual", residual, *shape)
    if not H:
        raise PykernelsError("a norm of no numbers", "Give at least one in the last dimension")
    T = x.numel() // H
    normed = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
    total = None if residual is None else torch.empty_like(x)
    record = Record(
        NORM,
        count_at=counted(T),
        x=x,
        x_stride=4 * H,
        adds=None if residual is None else Record(ADD, x=residual, stride=4 * H),
        add_count=int(residual is not None),
        sum=total,
        sum_stride=4 * H,
        weight=weight,
        eps=number("eps", eps),
        H=H,
        chunk=1,
        scratch=np.empty(H, np.float32),
        layouts=Record(LAYOUT, rows=normed, stride=2 * H, K=H),
        layout_count=1,
    )
    run_tasks(make_norm(), record.address)
    return normed, None if total is None else total.to(dtype)
