"""Q8_0: int8 codes in blocks of 32 inputs with one fp16 scale (ggml's ``block_q8_0``)."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ..format import Weight
from .base import GGUF, Blocks


class Q8_0(GGUF):
    """A stored block: fp16 scale, int8 [32]. Quantized as ggml does, bit for bit."""

    name = "q8_0"
    bits = 8
    int8_kind = "q8"
    error = "block amax / 127 * 0.57, and 4e-6 (fp16 scales) (ties away from zero)"
    share, floor = 0.57 / 127, 4e-6
    k_multiple, stored_bytes = 32, 34
    halves_at, halves, small = slice(0, 2), 1, 0

    def check(self, weight: Weight, N: int, K: int, name: str = "weight") -> None:
        super().check(weight, N, K, name)
        if bool((weight.data.reshape(-1, self.stored_bytes)[:, 2:] == 128).any()):
            raise PykernelsError(
                f"{name} holds codes of -128, which ggml never writes and no kernel reads",
                "Quantize the file again",
            )

    def split(self, raw: torch.Tensor) -> Blocks:
        return Blocks(raw[:, 2:].contiguous(), self.stored_halves(raw), raw[:, :0])

    def join(self, blocks: Blocks) -> torch.Tensor:
        return torch.cat((blocks.halves.view(torch.uint8), blocks.codes), dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        return blocks.codes.view(torch.int8).float() * blocks.halves.float()

    def fit(self, x: torch.Tensor) -> Blocks:
        scale = x.abs().amax(1, keepdim=True) / 127
        steps = x * torch.where(scale > 0, 1 / scale, 0)  # of the scale before it is fp16
        below = steps.abs().floor()
        rounded = below + (2 * (steps.abs() - below)).floor()
        codes = (rounded * steps.sign()).to(torch.int8).view(torch.uint8)
        return Blocks(codes, scale.to(torch.float16), codes[:, :0])
