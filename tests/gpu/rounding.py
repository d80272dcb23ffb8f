"""How far a result may be from float64's: what rounding it once to its dtype costs."""

from __future__ import annotations

import torch

from pykernels.gpu.common.launch import interpreted
from pykernels.testing import assert_close, relative_error


def assert_rounded(found: torch.Tensor, truth: torch.Tensor, slack: float = 1.05) -> None:
    """``found`` is as near ``truth`` (float64) as its dtype lets it be, up to ``slack``.

    Float32 results may be off by a few of its last bits: a GPU's exp and division are.
    Triton's interpreter cuts float32 to bfloat16 instead of rounding: up to a whole step there.
    """
    once = relative_error(truth.to(found.dtype), truth) if truth.numel() else 0.0
    if interpreted() and found.dtype == torch.bfloat16:
        once = 2.0**-7
    assert_close(found, truth, max(once * slack, 2e-6))
