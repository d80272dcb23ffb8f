"""Gates: heads times the sigmoid or the SiLU of theirs, normed before; and the delta rule's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.launch import check_device, why_not
from ..common.strides import check_out
from .checks import check_floats

MAX_WIDTH = 8192


@triton.jit(do_not_specialize=["rows"])  # one kernel for any number of tokens
def _gate(
    x,
    gate,
    weight,
    out,
    rows,
    heads,
    D,
    x_t,
    x_head,
    gate_t,
    gate_head,
    eps,
    NORM: tl.constexpr,
    ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    t, head, mask = row // heads, row % heads, (row < rows) & (d < D)
    value = tl.load(x + t * x_t + head * x_head + d, mask=mask, other=0.0).to(tl.float32)
    at = gate + t * gate_t + head * gate_head + (0 * d if ONE else d)
    opened = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(value * value, 1) / D
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(mean + eps)[:, None] * w * opened
    tl.store(out + row * D + d, value * tl.sigmoid(opened), mask=mask)


@triton.jit
def gates_of(a, b, a_log, dt_bias):
    """(g, beta) of float32 numbers, see ``delta_gates``."""
    x = a + dt_bias
    small = tl.exp(-tl.abs(x))
    # log(1 + small) = 2 atanh(z), by its series; a GPU's log is inexact near 1.
    z = small / (2.0 + small)
    w = z * z
    series = 1.0 / 15 * w + 1.0 / 13
    for n in tl.static_range(6):
        series = series * w + 1.0 / (11 - 2 * n)
    log1p = 2.0 * z * series
    return -tl.exp(a_log) * (tl.maximum(x, 0.0) + log1p), tl.sigmoid(b)


@triton.jit(do_not_specialize=["count"])
def _delta_gates(a, b, a_log, dt_bias, g, beta, count, HV, a_t, b_t, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, t, head = i < count, (i // HV).to(tl.int64), i % HV
    x = tl.load(a + t * a_t + head, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + t * b_t + head, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + head, mask=mask, other=0.0).to(tl.float32)
    rate = tl.load(a_log + head, mask=mask, other=0.0).to(tl.float32)
    log_decay, written = gates_of(x, y, rate, bias)
    tl.store(g + i, log_decay, mask=mask)
    tl.store(beta + i, written, mask=mask)


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None) -> torch.device:
    device = check_device(x, gate, *(() if weight is None else (weight,)))
    if x.ndim != 3 or not 1 <= x.shape[2] <= MAX_WIDTH:
        raise PykernelsError(
            f"x is {tuple(x.shape)}", f"Give [T, heads, D], D from 1 to {MAX_WIDTH}"
        )
    T, heads, D = x.shape
    check_floats("x", x, T, heads, D)
    one = weight is None and gate.ndim == 3 and gate.shape[2] == 1
    check_floats("gate", gate, T, heads, 1 if one else D)
    if weight is not None:
        check_floats("weight", weight, D)
    return device


def supports(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None) -> str | None:
    """None if ``sigmoid_mul`` takes these, or, with a weight, ``gated_rms_norm``; or the reason
    why not."""
    return why_not(_check, x, gate, weight)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``pykernels.ref.gated_rms_norm``: the same shapes, in float32, rounded once.

    Args:
        x, gate: floats [T, heads, D], any strides but the last, which is 1.
        weight: floats [D].
        out: floats [T, heads, D], contiguous.

    Returns:
        [T, heads, D] in x's dtype.

    Raises:
        PykernelsError: another dtype or shape, or no Triton for this device.
    """
    _check(x, gate, weight)
    return _gated(x, gate, weight, float(eps), out)


def sigmoid_mul(
    x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``pykernels.ref.sigmoid_mul``: the same shapes, in float32, rounded once.

    Args:
        x: floats [T, heads, D], any strides but the last, which is 1.
        gate: floats [T, heads, D] likewise, or [T, heads, 1] of one number a head.
        out: floats [T, heads, D], contiguous; may be x.

    Returns:
        [T, heads, D] in x's dtype.

    Raises:
        PykernelsError: another dtype or shape, or no Triton for this device.
    """
    _check(x, gate, None)
    return _gated(x, gate, None, 0.0, out)


def _gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    T, heads, D = x.shape
    out = check_out(out, x, *x.shape)
    if x.numel():
        block = triton.next_power_of_2(D)
        rows = max(1, min(16, 2048 // block))
        _gate[(triton.cdiv(T * heads, rows),)](
            x,
            gate,
            weight,
            out,
            T * heads,
            heads,
            D,
            *x.stride()[:2],
            *gate.stride()[:2],
            eps,
            NORM=weight is not None,
            ONE=gate.shape[2] == 1 and D > 1,
            ROWS=rows,
            BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
        )
    return out


def delta_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``pykernels.ref.delta_gates``: the same shapes, in float32.

    Args:
        a, b: floats [T, HV], rows of any stride.
        a_log, dt_bias: floats [HV].
        out: (g, beta), float32 [T, HV], contiguous.

    Returns:
        (g, beta), float32 [T, HV].

    Raises:
        PykernelsError: another dtype or shape, or no Triton for this device.
    """
    check_device(a, b, a_log, dt_bias)
    if a.ndim != 2:
        raise PykernelsError(f"a is {tuple(a.shape)}", "Give [T, HV]")
    T, HV = a.shape
    for name, x, shape in (("a", a, (T, HV)), ("b", b, (T, HV))):
        check_floats(name, x, *shape)
    for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
        check_floats(name, x, HV)
    g, beta = (check_out(out[i] if out else None, a, T, HV, dtype=torch.float32) for i in (0, 1))
    if a.numel():
        block = 256
        _delta_gates[(triton.cdiv(T * HV, block),)](
            a, b, a_log, dt_bias, g, beta, T * HV, HV, a.stride(0), b.stride(0), BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    return g, beta
