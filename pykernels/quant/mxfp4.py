"""MXFP4: E2M1 elements in groups of 32 inputs with a power-of-two scale (OCP Microscaling v1.0).

A code is ``s ee m``: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. A scale is E8M0, ``2**(e -
127)``; 255 is NaN. Both are exact in bfloat16. It lies in the tile layout as int4 does.
"""

from __future__ import annotations

import torch

from ..errors import PykernelsError
from .format import Format, Weight, check_finite
from .layout import N_BLOCK, pack_columns, pack_fours, unpack_columns, unpack_fours

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32, device="cpu")
"""float32 [16]: the value of every code."""

_EMAX = 2  # exponent of the largest E2M1 magnitude's power of two
# Between two magnitudes; a tie goes to the even code (round to nearest even).
_MIDPOINTS = (VALUES[:7] + VALUES[1:8]) / 2


def nearest_code(x: torch.Tensor) -> torch.Tensor:
    """uint8 like ``x``: the code of the value that is nearest to each float32."""
    above = torch.bucketize(x.abs(), _MIDPOINTS)  # midpoints below |x|: a tie stays low
    at_tie = x.abs() == _MIDPOINTS[above.clamp(max=6)]
    code = above + (at_tie & (above % 2 == 1))
    return (code + 8 * (x < 0)).to(torch.uint8)


class MXFP4(Format):
    """``data`` uint8 [N, K], a code a byte; ``scale`` uint8 E8M0 [N, ceil(K / 32)]."""

    name = "mxfp4"
    dtype = torch.uint8
    scale_dtypes = (torch.uint8,)
    bits = 4
    error = "max(|w| / 4, scale / 4), and up to 2 * scale where |w| > 6 * scale (saturation)"

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        N, K = matrix.shape
        groups = -(-K // GROUP)
        whole = torch.zeros(N, groups * GROUP, dtype=torch.float32, device="cpu")
        whole[:, :K] = matrix
        amax = whole.view(N, groups, GROUP).abs().amax(dim=2)
        check_finite(amax, self.name)
        # The specification's rule: the power of two of amax, minus that of the element type.
        exponent = torch.frexp(amax).exponent - 1 - _EMAX
        scale = (exponent + 127).clamp(0, 254).to(torch.uint8)
        return Weight(nearest_code(matrix.float() / self._expand(scale, K)), scale)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        assert weight.scale is not None
        return VALUES[weight.data.long()] * self._expand(weight.scale, weight.data.shape[1])

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return N, -(-K // GROUP)

    def scale_bytes(self, K: int) -> int:
        """bfloat16 [groups, 32 outputs] of a block."""
        return self.padded_k(K) // GROUP * N_BLOCK * 2

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        if (most := int(weight.data.max())) > 15:
            raise PykernelsError(f"{name} has codes up to {most}", "Give one 4-bit code a byte")
        if weight.scale is not None and int(weight.scale.max()) == 255:
            raise PykernelsError(f"{name} has a scale of 255, which is NaN", "Check the checkpoint")

    def pack_data(self, data: torch.Tensor, blocks: torch.Tensor) -> None:
        pack_fours(data, blocks, self.bits)

    def unpack_data(self, blocks: torch.Tensor, N: int, K: int) -> torch.Tensor:
        return unpack_fours(blocks, N, K, self.bits)

    def pack_scales(self, scale: torch.Tensor, scales: torch.Tensor) -> None:
        powers = self.power(scale).bfloat16()
        pack_columns(powers, scales.view(torch.bfloat16).unflatten(1, (-1, N_BLOCK)))

    def unpack_scales(self, scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
        columns = scales.view(torch.bfloat16).unflatten(1, (-1, N_BLOCK))
        return self.exponent(unpack_columns(columns, N, -(-K // GROUP)))

    @staticmethod
    def exponent(powers: torch.Tensor) -> torch.Tensor:
        """E8M0 of powers of two: the inverse of ``power``."""
        return (torch.frexp(powers.float()).exponent - 1 + 127).to(torch.uint8)

    @staticmethod
    def power(scale: torch.Tensor) -> torch.Tensor:
        """float32 of E8M0."""
        bits = scale.int() << 23  # an exponent's place in float32, where 2**-127 is subnormal
        return torch.where(bits > 0, bits, 1 << 22).view(torch.float32)

    def _expand(self, scale: torch.Tensor, K: int) -> torch.Tensor:
        return self.power(scale).repeat_interleave(GROUP, dim=1)[:, :K]
