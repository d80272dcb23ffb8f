"""RMSNorm, with the residual's addition in the same pass (arXiv 1910.07467); a norm behind a
branch, and the cap of logits (Gemma)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..errors import PykernelsError
from .common.launch import FLOATS, check_device, launches_early, unsupported, why_not
from .common.strides import check_out, rows_of

MAX_WIDTH = 32768
_PIECE = 2048  # logits of a program


@triton.jit(do_not_specialize=["N"])  # one kernel for any number of rows
def _rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    N,
    H,
    x_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    if TRIGGER:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    h = tl.arange(0, BLOCK)[None, :]
    mask = (row < N) & (h < H)
    value = tl.load(x + row * x_stride + h, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual + row * residual_stride + h, mask=mask, other=0.0)
        stored = (value + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * H + h, stored, mask=mask)
        value = stored.to(tl.float32)  # what later layers will see
    mean = tl.sum(value * value, 1) / H
    w = tl.load(weight + h, mask=h < H, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(mean + eps)[:, None] * w
    tl.store(out + row * H + h, normed, mask=mask)


@triton.jit(do_not_specialize=["N"])
def _post_norm(
    x,
    residual,
    weight,
    scale,
    out,
    N,
    H,
    x_stride,
    residual_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    if TRIGGER:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    h = tl.arange(0, BLOCK)[None, :]
    mask = (row < N) & (h < H)
    value = tl.load(x + row * x_stride + h, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 1) / H
    w = tl.load(weight + h, mask=h < H, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(mean + eps)[:, None] * w
    if residual is not None:
        value += tl.load(residual + row * residual_stride + h, mask=mask, other=0.0).to(tl.float32)
    if scale is not None:
        value *= tl.load(scale).to(tl.float32)
    tl.store(out + row * H + h, value, mask=mask)


@triton.jit
def _softcap(x, out, N, cap, BLOCK: tl.constexpr, TRIGGER: tl.constexpr):
    if TRIGGER:
        gdc_launch_dependents()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < N, other=0.0).to(tl.float32)
    # tanh(z) as 2 * sigmoid(2 * z) - 1, whose exponential never overflows into a NaN.
    opened = 1 / (1 + tl.exp(value * (-2 / cap)))
    tl.store(out + i, cap * (2 * opened - 1), mask=i < N)


def supports(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """None if `rms_norm` takes these, or the reason why not."""
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        return f"x is {x.dtype}, weight {weight.dtype}: not floats of 16 or 32 bits"
    if x.ndim < 1 or x.shape[-1] > MAX_WIDTH:
        return f"x is {tuple(x.shape)}: no rows, or wider ones than {MAX_WIDTH}"
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        return f"the weight is {tuple(weight.shape)}, rows have {x.shape[-1]}"
    return why_not(rows_of, x, "x") or unsupported(x, weight)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x / sqrt(mean(x^2) + eps) * weight``, in float32, rounded once.

    Args:
        x: [..., H], rows contiguous and equally far apart (a slice of wider rows is fine).
        weight: [H].
        eps: added to the mean.
        residual: [..., H], added to ``x`` first.
        out: results to write to, contiguous: the normed rows and, with a residual, the sum (which
            may be ``residual`` or ``x`` itself).

    Returns:
        The normed sum and the sum (None without ``residual``), both of x's dtype.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(x, weight, *(() if residual is None else (residual,)))
    if reason := supports(x, weight):
        raise PykernelsError(f"rms_norm does not take these: {reason}", "Convert them")
    if residual is not None and (residual.shape != x.shape or residual.dtype not in FLOATS):
        raise PykernelsError(
            f"the residual is {residual.dtype} {tuple(residual.shape)}", f"Give it {tuple(x.shape)}"
        )
    count, stride = rows_of(x, "x")
    _, residual_stride = (0, 0) if residual is None else rows_of(residual, "residual")
    normed = check_out(out[0] if out else None, x, *x.shape)
    total = None if residual is None else check_out(out[1] if out else None, x, *x.shape)
    if count:
        H = x.shape[-1]
        block = triton.next_power_of_2(H)
        rows = max(1, min(16, 2048 // block)) if count > 1 else 1
        num_warps = 4 if rows * block <= 4096 else 8 if block <= 8192 else 16
        _rms_norm[(triton.cdiv(count, rows),)](
            x,
            residual,
            weight,
            normed,
            total,
            count,
            H,
            stride,
            residual_stride,
            float(eps),
            ADD=residual is not None,
            ROWS=rows,
            BLOCK=block,
            TRIGGER=launches_early(x.device),
            num_warps=num_warps,
        )
    return normed, total


def post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(residual + rms_norm(x)) * scale``: a branch's result, normed before it joins (Gemma).

    Args:
        x: [..., H]; ``residual``: the same, or None for zeros; rows contiguous, equally far apart.
        weight: [H]; ``scale``: [1], or None for 1.
        eps: added to the mean.
        out: float32 of x's shape, contiguous (it may be ``residual`` itself); None: new.

    Returns:
        float32 of x's shape.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(x, weight, *(given for given in (residual, scale) if given is not None))
    if reason := supports(x, weight):
        raise PykernelsError(f"post_norm does not take these: {reason}", "Convert them")
    if residual is not None and (residual.shape != x.shape or residual.dtype not in FLOATS):
        raise PykernelsError(
            f"the residual is {residual.dtype} {tuple(residual.shape)}", f"Give it {tuple(x.shape)}"
        )
    if scale is not None and (scale.numel() != 1 or scale.dtype not in FLOATS):
        raise PykernelsError(f"scale is {scale.dtype} {tuple(scale.shape)}", "Give one float")
    count, stride = rows_of(x, "x")
    _, residual_stride = (0, 0) if residual is None else rows_of(residual, "residual")
    out = check_out(out, x, *x.shape, dtype=torch.float32)
    if count:
        H = x.shape[-1]
        block = triton.next_power_of_2(H)
        rows = max(1, min(16, 2048 // block)) if count > 1 else 1
        _post_norm[(triton.cdiv(count, rows),)](
            x,
            residual,
            weight,
            scale,
            out,
            count,
            H,
            stride,
            residual_stride,
            float(eps),
            ROWS=rows,
            BLOCK=block,
            TRIGGER=launches_early(x.device),
            num_warps=4 if rows * block <= 4096 else 8 if block <= 8192 else 16,
        )
    return out


def softcap(x: torch.Tensor, cap: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """``cap * tanh(x / cap)`` (Gemma 2, arXiv 2408.00118, 2).

    Args:
        x: floats, contiguous.
        cap: above 0.
        out: float32 of x's shape, contiguous (it may be ``x`` itself); None: new.

    Raises:
        PykernelsError: other dtypes, or no Triton for this device.
    """
    check_device(x)
    if x.dtype not in FLOATS or not x.is_contiguous():
        raise PykernelsError(f"x is {x.dtype} {tuple(x.shape)}", "Give contiguous floats")
    if not cap > 0:
        raise PykernelsError(f"the cap is {cap}", "Give a number above 0")
    out = check_out(out, x, *x.shape, dtype=torch.float32)
    if N := x.numel():
        early = launches_early(x.device)
        _softcap[(triton.cdiv(N, _PIECE),)](
            x, out, N, float(cap), BLOCK=_PIECE, TRIGGER=early, num_warps=4
        )
    return out
