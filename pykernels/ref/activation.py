"""The gated activation in plain torch."""

from __future__ import annotations

import torch

from ..shapes import ExpertSpec


def swiglu(gate: torch.Tensor, up: torch.Tensor, spec: ExpertSpec) -> torch.Tensor:
    """What ``ExpertSpec`` says of gate and up, both [..., I]; its biases joined before. Source:
    transformers' ``GptOssExperts._apply_gate``."""
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    bent = gate + spec.cubic * gate**3 if spec.cubic else gate
    return gate * torch.sigmoid(spec.alpha * bent) * (up + spec.up_offset)
