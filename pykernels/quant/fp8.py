"""FP8 E4M3 with one float32 scale for each 128 x 128 block (DeepSeek-V3's checkpoint format), or
for each output.

A code is ``s eeee mmm``: ``2**(e - 7) * (1 + m / 8)``, or ``2**-6 * m / 8`` where e = 0
(subnormal); 448 is the largest, 0x7f and 0xff are NaN, there is no infinity (OCP 8-bit floating
point, "E4M3"). All 254 finite codes are exact in bfloat16, which the kernels rely on.
"""

from __future__ import annotations

import torch

from ..errors import PykernelsError
from .channel import SCALE_DTYPES, ChannelScales, channel_scale
from .format import Format, Weight, check_finite
from .layout import K_BLOCK, N_BLOCK, padded

MAX = 448.0
"""The largest finite E4M3 value."""


def _error(part: str) -> str:
    """``Format.error`` where a ``part`` of a matrix shares a scale."""
    return (
        f"max(|w| * 2**-4, {part} amax * 2**-10 / 448) (round to nearest even), and 2**-141"
        " (float32 scales)"
    )


class E4M3(Format):
    """What both formats share: the codes."""

    dtype = torch.float8_e4m3fn
    scale_dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES
    bits = 8

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        codes = weight.data  # one NaN is the largest signed byte, the other the largest unsigned
        if int(codes.view(torch.int8).max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF:
            raise PykernelsError(
                f"{name} has codes that are NaN (0x7f, 0xff)", "Check the checkpoint"
            )


class FP8(E4M3):
    """E4M3 blocks; ragged last blocks are allowed, as in DeepSeek's 576-row ``kv_a_proj``."""

    name = "fp8"
    error = _error("block")

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        N, K = matrix.shape
        rows, cols = self._scale_shape(N, K)
        blocks = torch.zeros(rows * K_BLOCK, cols * K_BLOCK, dtype=torch.float32, device="cpu")
        blocks[:N, :K] = matrix
        amax = blocks.view(rows, K_BLOCK, cols, K_BLOCK).abs().amax(dim=(1, 3))
        check_finite(amax, self.name)
        scale = channel_scale(amax, MAX)  # [rows, cols]
        scaled = matrix.float() / self.expand(scale, N, K)
        return Weight(scaled.clamp(-MAX, MAX).to(torch.float8_e4m3fn), scale)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        assert weight.scale is not None
        return weight.data.float() * self.expand(weight.scale.float(), *weight.data.shape)

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return self._scale_shape(N, K)

    def scale_bytes(self, K: int) -> int:
        """One float32 for 32 rows and 128 inputs: each 128-row scale is stored four times."""
        return padded(1, K)[1] // K_BLOCK * 4

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        by_block = scale.float().repeat_interleave(K_BLOCK // N_BLOCK, dim=0)[: len(scales)]
        scales.copy_(by_block.contiguous().view(torch.uint8))

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
        return scales.contiguous().view(torch.float32)[:: K_BLOCK // N_BLOCK].contiguous()

    @staticmethod
    def _scale_shape(N: int, K: int) -> tuple[int, int]:
        return -(-N // K_BLOCK), -(-K // K_BLOCK)

    @staticmethod
    def expand(scale: torch.Tensor, N: int, K: int) -> torch.Tensor:
        """One scale a block -> one a weight [N, K]."""
        rows = scale.repeat_interleave(K_BLOCK, dim=0)[:N]
        return rows.repeat_interleave(K_BLOCK, dim=1)[:, :K]


class FP8Channel(ChannelScales, E4M3):
    """E4M3 with a scale for each output: compressed-tensors' FP8 of strategy "channel"."""

    name = "fp8-channel"
    error = _error("output")

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        amax = matrix.float().abs().amax(1, keepdim=True)
        check_finite(amax, self.name)
        scale = channel_scale(amax, MAX)  # [N, 1]
        return Weight((matrix.float() / scale).clamp(-MAX, MAX).to(self.dtype), scale)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        assert weight.scale is not None
        return weight.data.float() * weight.scale.float()


def e4m3_values() -> torch.Tensor:
    """float32 [256]: the value of every E4M3 code (NaN for 0x7f and 0xff)."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
