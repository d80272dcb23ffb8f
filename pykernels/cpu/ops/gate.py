"""Gates of heads and of the delta rule on the calling thread."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ...target import detect
from ..delta_net.gate import DELTA_GATES, GATE, make_delta_gates, make_gate
from ..vectors import width
from .checks import floats, number
from .serial import Record, counted, run_tasks


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * silu(gate)`` over the last dimension.

    Args:
        x: floats [T, heads, D], D a multiple of 16; each head is normed by itself.
        gate: floats [T, heads, D].
        weight: floats [D].
        eps: added to the mean.

    Returns:
        float32 [T, heads, D].

    Raises:
        PykernelsError: dtypes or shapes that do not fit.
    """
    x = floats("x", x, "T", "heads", "D")
    T, heads, D = x.shape
    gate = floats("gate", gate, T, heads, D)
    return _gated(x, gate, floats("weight", weight, D), number("eps", eps))


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``: the gate of attention's heads, or of a shared expert.

    Args:
        x: floats [T, heads, D], D a multiple of 16.
        gate: floats [T, heads, D], or [T, heads, 1] of one number a head.

    Returns:
        float32 [T, heads, D].

    Raises:
        PykernelsError: dtypes or shapes that do not fit.
    """
    x = floats("x", x, "T", "heads", "D")
    T, heads, D = x.shape
    one = getattr(gate, "ndim", 0) == 3 and gate.shape[2] == 1
    return _gated(x, floats("gate", gate, T, heads, 1 if one else D), None, 0.0)


def _gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    T, heads, D = x.shape
    if not D or D % 16:
        raise PykernelsError(f"heads of {D} numbers", "Give a multiple of 16")
    width_of_gate = gate.shape[2]
    out = torch.empty(T, heads, D, dtype=torch.float32, device="cpu")
    record = Record(
        GATE,
        count_at=counted(T),
        x=x,
        x_stride=4 * heads * D,
        gate=gate,
        gate_stride=4 * heads * width_of_gate,
        gate_head_bytes=4 * width_of_gate,
        one=width_of_gate == 1,
        weight=weight,
        eps=eps,
        heads=heads,
        D=D,
        out=out,
        out_stride=4 * heads * D,
    )
    run_tasks(make_gate(width(detect())), record.address)
    return out


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two gates of `gated_delta_rule` from what is projected for them.

    Args:
        a, b: floats [T, HV].
        a_log, dt_bias: floats [HV].

    Returns:
        (g, beta), float32 [T, HV]: ``-exp(a_log) softplus(a + dt_bias)`` and ``sigmoid(b)``.

    Raises:
        PykernelsError: dtypes or shapes that do not fit.
    """
    a = floats("a", a, "T", "HV")
    T, HV = a.shape
    g, beta = (torch.empty(T, HV, dtype=torch.float32, device="cpu") for _ in "gb")
    record = Record(
        DELTA_GATES,
        count_at=counted(T),
        a=a,
        a_stride=4 * HV,
        b=floats("b", b, T, HV),
        b_stride=4 * HV,
        rate=-floats("a_log", a_log, HV).exp(),
        dt_bias=floats("dt_bias", dt_bias, HV),
        HV=HV,
        g=g,
        beta=beta,
    )
    run_tasks(make_delta_gates(), record.address)
    return g, beta
