"""RMSNorm on the calling thread."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import PykernelsError
from ...target import detect
from ..activations.post_norm import POST_NORM, make_post_norm
from ..norm import ADD, LAYOUT, NORM, make_norm
from ..sampling.softcap import SOFTCAP, make_softcap
from ..vectors import width
from .checks import floats, number, optional_floats
from .serial import Record, counted, run_tasks


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv 1910.07467), in
    float32, on the calling thread alone.

    Args:
        x: float32, bfloat16 or float16 [..., H].
        weight: floats [H].
        eps: added to the mean.
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


def post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(residual + rms_norm(x)) * scale``: a branch's result, normed before it joins (Gemma), in
    float32, on the calling thread alone.

    Args:
        x: floats [..., H]; ``residual``: the same, or None for zeros.
        weight: floats [H]; ``scale``: floats [1], or None for 1.
        eps: added to the mean.

    Returns:
        float32 [..., H].

    Raises:
        PykernelsError: dtypes or shapes that do not fit.
    """
    weight = floats("weight", weight, "H")
    H, shape = weight.shape[0], getattr(x, "shape", ())
    x = floats("x", x, *[f"n{i}" for i in range(len(shape) - 1)], H)
    if residual is not None:
        residual = floats("residual", residual, *shape)
    if not H:
        raise PykernelsError("a norm of no numbers", "Give at least one in the last dimension")
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    record = Record(
        POST_NORM,
        count_at=counted(x.numel() // H),
        x=residual,
        x_stride=4 * H,
        adds=Record(ADD, x=x, stride=4 * H),
        add_count=1,
        weight=weight,
        scale=optional_floats("scale", scale, 1),
        eps=number("eps", eps),
        H=H,
        out=out,
        out_stride=4 * H,
        scratch=np.empty(H, np.float32),
    )
    run_tasks(make_post_norm(), record.address)
    return out


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)`` (Gemma 2, arXiv 2408.00118, 2), on the calling thread alone.

    Args:
        x: floats of any shape, of one dimension at least.
        cap: above 0.

    Returns:
        float32, in the shape of x.

    Raises:
        PykernelsError: no floats, or another cap.
    """
    out = floats("x", x, *[f"n{i}" for i in range(getattr(x, "ndim", 0))]).clone()
    V = out.shape[-1]
    record = Record(
        SOFTCAP,
        count_at=counted(out.numel() // max(V, 1)),
        x=out,
        x_stride=4 * V,
        V=V,
        cap=number("cap", cap, 0.0),
    )
    run_tasks(make_softcap(width(detect())), record.address)
    return out
