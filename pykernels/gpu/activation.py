"""The gated activation of an expert: SiLU of the gate, times up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..errors import PykernelsError
from .common.launch import FLOATS, check_device, launches_early, unsupported, why_not
from .common.strides import check_out, rows_of


@triton.jit
def _silu_mul(gate_up, out, I, stride, BLOCK: tl.constexpr, TRIGGER: tl.constexpr):  # noqa: E741
    if TRIGGER:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + I + i, mask=i < I, other=0.0).to(tl.float32)
    tl.store(out + row * I + i, gate * tl.sigmoid(gate) * up, mask=i < I)


def supports(gate_up: torch.Tensor) -> str | None:
    """None if `silu_mul` takes this, or the reason why not."""
    if gate_up.dtype not in FLOATS or gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        return f"gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not floats [..., 2I]"
    return why_not(rows_of, gate_up, "gate_up") or unsupported(gate_up)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` in float32, rounded once.

    Args:
        gate_up: [..., 2I], gate first; rows contiguous and equally far apart.
        out: [..., I], contiguous.

    Raises:
        PykernelsError: another dtype or shape, or no Triton for this device.
    """
    check_device(gate_up)
    if reason := supports(gate_up):
        raise PykernelsError(f"silu_mul does not take this: {reason}", "Convert it")
    I = gate_up.shape[-1] // 2  # noqa: E741
    count, stride = rows_of(gate_up, "gate_up")
    out = check_out(out, gate_up, *gate_up.shape[:-1], I)
    if count and I:
        block = min(2048, triton.next_power_of_2(I))
        grid = (count, triton.cdiv(I, block))
        trigger = launches_early(gate_up.device)
        _silu_mul[grid](gate_up, out, I, stride, BLOCK=block, TRIGGER=trigger, num_warps=4)
    return out
