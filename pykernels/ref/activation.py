"""The gated activation in plain torch."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``silu(gate) * up`` of [..., 2I], gate first: [..., I] in ``dtype``."""
    gate, up = gate_up.to(dtype).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
