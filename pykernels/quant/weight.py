"""One logical weight matrix as a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K] (N outputs, K inputs) and the scales of its format, if it has any.

    ============  ==================================  ==============================================
    format        ``data``                            ``scale`` (multiply to dequantize)
    ============  ==================================  ==============================================
    ``bf16``      bfloat16 [N, K]                     None
    ``fp8``       float8_e4m3fn [N, K]                float32 [ceil(N / 128), ceil(K / 128)]
    ============  ==================================  ==============================================
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.data.shape
        return N, K
