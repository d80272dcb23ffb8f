"""One logical weight matrix as a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K] (N outputs, K inputs) and the scales of its format, if it has any.

    ==================  ==================================  ========================================
    format              ``data``                            ``scale`` (multiply to dequantize)
    ==================  ==================================  ========================================
    ``bf16``            bfloat16 [N, K]                     None
    ``fp8``             float8_e4m3fn [N, K]                float32 [ceil(N / 128), ceil(K / 128)]
    ``fp8-channel``     float8_e4m3fn [N, K]                float32 [N, 1]
    ``int8``, ``int4``  int8 [N, K], a number a byte        bfloat16 [N, ceil(K / group)]
    ``int8-channel``,   the same                            float32 [N, 1]
    ``int4-channel``
    ``mxfp4``           uint8 [N, K], a code a byte         uint8 [N, ceil(K / 32)], E8M0
    ``q4_k``, ``q5_k``  uint8 [N, K / 256 * 144 or 176]     None: a GGUF file's rows hold their own
    ``q6_k``, ``q8_0``  uint8 [N, K / 256 * 210],           None
                        uint8 [N, K / 32 * 34]
    ==================  ==================================  ========================================

    What N and K are is therefore the format's to say: ``Format.logical_shape``.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
