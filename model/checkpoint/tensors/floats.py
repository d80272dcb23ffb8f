"""Unquantized tensors, checked while they are read."""

from __future__ import annotations

import re

import torch

from pykernels.errors import PykernelsError

from .safetensors import Checkpoint, TensorSlice

_MAY_BE_NEVER = re.compile(
    r"(e_score_correction_bias|expert_bias|router\.bias|sinks|exp_probs_b\.bias|ffn_gate_inp\.bias"
    r"|attn_sinks\.weight)$"
)
"""Biases before a choice or a softmax, in which -inf takes an expert or the sink out."""
_SERIAL = 32_000
"""Numbers that torch adds on one thread."""


def floats(checkpoint: Checkpoint, part: TensorSlice) -> torch.Tensor:
    """Floats as they are stored.

    Raises `PykernelsError` for NaN, and for infinities but -inf where it means "never".
    """
    values = checkpoint.read(part)
    if not values.is_floating_point() or _sum(values).isfinite():
        return values
    good = values.isfinite()
    if _MAY_BE_NEVER.search(part.name):
        good |= values.isneginf()
    if not good.all():
        what = "NaN" if values.isnan().any() else "infinities"
        raise PykernelsError(f"{part.name} holds {what}", "Check the checkpoint")
    return values


def _sum(values: torch.Tensor) -> torch.Tensor:
    """A sum, which is 30 times as fast as a test of each number; finite numbers seldom have an
    infinite one. In parts, for which torch starts no threads beside the workers'."""
    parts = values.flatten().split(_SERIAL)
    return torch.stack([part.sum() for part in parts]).sum()
