"""int4 with zero points: unsigned codes; for each output and group of inputs a scale and a zero.

``w = scale * (q - zero)`` with ``q`` in 0 .. 15 and ``zero`` in 0 .. 16, as AWQ's and GPTQ's
checkpoints have it; their scales are float16. All of it is exact in float32.

Packed, codes are fours (``layout``), and for each group of 32 outputs' inputs there are 32 scales,
float16, then 32 zero points, a byte each.
"""

from __future__ import annotations

import torch

from ..errors import PykernelsError
from .format import Format, Weight, check_finite, check_held
from .layout import K_BLOCK, N_BLOCK, pack_columns, pack_fours, unpack_columns, unpack_fours

LEVELS = 15
"""The largest code."""
MOST_ZERO = 16
"""The largest zero point: GPTQ stores one less, in 4 bits."""

GROUP_BYTES = N_BLOCK * 3
"""Packed scales and zero points of 32 outputs' group."""


class ZeroPoint(Format):
    """Codes of 4 bits with zero points.

    ``scale`` is [N, 2 * groups]: of each group the scale and the zero point, in turns.

    Args:
        name: as on the command line.
        group: inputs of one scale, 32 or 128.
    """

    dtype = torch.uint8
    scale_dtypes = (torch.float16,)
    bits = 4
    int8_kind = "q8"

    def __init__(self, name: str, group: int) -> None:
        if group not in (32, K_BLOCK):
            raise PykernelsError(f"zero points of groups of {group}", "Use groups of 32 or 128")
        self.name, self.group = name, group
        self.error = (
            f"half a step: the range of a group, with zero, / {LEVELS} / 2 * (1 + 2**-10), since"
            " the step is rounded up to float16, and 2**-25 (float16 scales)"
        )

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        N, K = matrix.shape
        groups = -(-K // self.group)
        whole = torch.zeros(N, groups * self.group, dtype=torch.float32, device="cpu")
        whole[:, :K] = matrix
        parts = whole.view(N, groups, self.group)
        check_finite(parts.abs().amax(), self.name)
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        exact = (high - low) / LEVELS
        scale = exact.to(torch.float16)
        scale = torch.where(scale.float() < exact, _next_up(scale), scale)
        check_held(scale, matrix.abs().max(), self.name)
        scale = torch.where(scale > 0, scale, 1)
        zero = torch.round(-low / scale.float())
        both = torch.stack((scale, zero.to(torch.float16)), dim=2).view(N, 2 * groups)
        step, middle = self._expand(both, K)
        q = (torch.round(matrix.float() / step) + middle).clamp(0, LEVELS)
        return Weight(q.to(torch.uint8), both)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        assert weight.scale is not None
        scale, zero = self._expand(weight.scale, weight.data.shape[1])
        return scale * (weight.data.float() - zero)

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return N, 2 * -(-K // self.group)

    def scale_bytes(self, K: int) -> int:
        return self.padded_k(K) // self.group * GROUP_BYTES

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        if (most := int(weight.data.max())) > LEVELS:
            raise PykernelsError(f"{name} has codes up to {most}", "Give one 4-bit code a byte")
        assert weight.scale is not None
        zero = weight.scale[:, 1::2]
        if not bool(((zero >= 0) & (zero <= MOST_ZERO) & (zero == zero.round())).all()):
            raise PykernelsError(
                f"{name} has zero points that are no integers of 0 .. {MOST_ZERO}",
                "Give each group's scale and its zero point, in turns",
            )

    def pack_data(self, data: torch.Tensor, blocks: torch.Tensor) -> None:
        pack_fours(data, blocks, self.bits)

    def unpack_data(self, blocks: torch.Tensor, N: int, K: int) -> torch.Tensor:
        return unpack_fours(blocks, N, K, self.bits)

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        halves, zeros = self._columns(scales)
        pack_columns(scale[:, 0::2], halves)
        pack_columns(scale[:, 1::2].to(torch.uint8), zeros)

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
        groups = -(-K // self.group)
        scale, zero = (unpack_columns(part, N, groups) for part in self._columns(scales))
        return torch.stack((scale, zero.to(torch.float16)), dim=2).view(N, 2 * groups)

    @staticmethod
    def _columns(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of packed scales: float16 [N / 32, groups, 32] and uint8 of the same shape."""
        stream = scales.unflatten(1, (-1, GROUP_BYTES))
        return stream[..., : 2 * N_BLOCK].view(torch.float16), stream[..., 2 * N_BLOCK :]

    def _expand(self, scale: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero point) of every weight, float32 [N, K] each."""
        wide = scale.float().repeat_interleave(self.group, dim=1)
        N, groups = scale.shape[0], scale.shape[1] // 2
        parts = wide.view(N, groups, 2, self.group)
        return parts[:, :, 0].reshape(N, -1)[:, :K], parts[:, :, 1].reshape(N, -1)[:, :K]


def _next_up(x: torch.Tensor) -> torch.Tensor:
    """The next larger float16 of positive ones."""
    return (x.view(torch.int16) + 1).view(torch.float16)
