"""The gated activation in plain torch."""

from __future__ import annotations

import torch

from ..shapes import ExpertSpec


def swiglu(gate: torch.Tensor, up: torch.Tensor, spec: ExpertSpec) -> torch.Tensor:
    """``(up + up_offset) * gate * sigmoid(alpha * gate)`` of both [..., I], clamped, as ``spec``
    says; its biases joined before. Source: transformers' ``GptOssExperts._apply_gate``."""
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + spec.up_offset)
