"""bfloat16: 8 bits of mantissa, no scales."""

from __future__ import annotations

import torch

from .format import Format, Weight, check_held


class BF16(Format):
    """Weights as most checkpoints ship them; NaN and infinities stay what they are."""

    name = "bf16"
    dtype = torch.bfloat16
    bits = 16
    error = "|w| * 2**-8 (round to nearest even), and 2**-134 (the least bfloat16 is 2**-133)"

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        data = matrix.to(torch.bfloat16)
        amax = matrix[data.isinf()].double().abs()
        amax = amax[amax.isfinite()]  # what was no infinity and became one
        check_held(amax.to(torch.bfloat16), amax, self.name)
        return Weight(data)

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return weight.data.float()

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return None
