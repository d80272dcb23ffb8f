"""The gated activation in plain torch."""

from __future__ import annotations

import torch

from ..shapes import ExpertSpec


def silu_mul(gate_up: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``silu(gate) * up`` of [..., 2I], gate first: [..., I] in ``dtype``."""
    gate, up = gate_up.to(dtype).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu(gate: torch.Tensor, up: torch.Tensor, spec: ExpertSpec) -> torch.Tensor:
    """``(up + up_offset) * gate * sigmoid(alpha * gate)`` of both [..., I], clamped, as ``spec``
    says; its biases joined before. Source: transformers' ``GptOssExperts._apply_gate``."""
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + spec.up_offset)
