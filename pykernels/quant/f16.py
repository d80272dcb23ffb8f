"""float16: 11 bits of mantissa, no scales. More than a bfloat16 has: kernels multiply floats."""

from __future__ import annotations

import torch

from ..errors import PykernelsError
from .format import Format, Weight, check_finite, check_held


class F16(Format):
    """Weights as GGUF's F16 and older checkpoints have them."""

    name = "f16"
    dtype = torch.float16
    bits = 16
    error = "|w| * 2**-11 (round to nearest even), and 2**-25 (the least float16 is 2**-24)"

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        if not weight.data.isfinite().all():
            raise PykernelsError(
                f"{name} has weights that are NaN or infinite", "Check the checkpoint"
            )

    def _quantize(self, matrix: torch.Tensor) -> Weight:
        amax = matrix.abs().max()
        check_finite(amax, self.name)
        check_held(amax.to(torch.float16), amax, self.name)
        return Weight(matrix.to(torch.float16))

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return weight.data.float()

    def scale_shape(self, N: int, K: int) -> tuple[int, int] | None:
        return None
