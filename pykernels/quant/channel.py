"""One float32 scale for each output: what formats of that kind share."""

from __future__ import annotations

import torch

from .format import Format
from .layout import N_BLOCK, pack_columns, unpack_columns

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What checkpoints have; packed as float32."""


class ChannelScales(Format):
    """Scales [N, 1]: compressed-tensors' strategy "channel"."""

    scale_dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return N, 1

    def scale_bytes(self, K: int) -> int:
        """float32 [32 outputs], whatever K is."""
        return 4 * N_BLOCK

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        pack_columns(scale, scales.view(torch.float32).unflatten(1, (1, N_BLOCK)))

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
        return unpack_columns(scales.view(torch.float32).unflatten(1, (1, N_BLOCK)), N, 1)


def channel_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """float32 scales that take magnitudes up to ``amax`` to ``largest``; 1 where all are zero.

    Never 0, which the division of the least float32 numbers gives: 0 / 0 would be NaN.
    """
    return torch.where(amax > 0, (amax.float() / largest).clamp_min(2.0**-149), 1.0)
