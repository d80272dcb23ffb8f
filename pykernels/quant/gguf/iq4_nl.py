"""IQ4_NL: codes of 4 bits into a table of integers, blocks of 32 inputs with one fp16 scale.

Source: ``block_iq4_nl`` and ``kvalues_iq4nl`` of ggml (``ggml-common.h``).
"""

from __future__ import annotations

import torch

from .base import GGUF, Blocks

VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    dtype=torch.float32,
    device="cpu",
)
"""float32 [16]: the value of every code, times the scale a weight; exact in bfloat16."""

_MIDPOINTS = (VALUES[:-1] + VALUES[1:]) / 2


class IQ4NL(GGUF):
    """A stored block: fp16 scale; 16 bytes with the codes, those of inputs 0 to 15 in the low
    halves. The largest magnitude of a block becomes -127 times its scale."""

    name, bits = "iq4_nl", 4
    int8_kind = "q8"
    error = "block amax * 14 / 127 * 1.01, and 4e-6 (fp16 scales)"
    share, floor = 14 / 127, 4e-6
    k_multiple, stored_bytes = 32, 18
    halves_at, halves, small = slice(0, 2), 1, 0

    def split(self, raw: torch.Tensor) -> Blocks:
        codes = torch.cat((raw[:, 2:] & 15, raw[:, 2:] >> 4), dim=1)
        return Blocks(codes, self.stored_halves(raw), raw[:, :0])

    def join(self, blocks: Blocks) -> torch.Tensor:
        low, high = blocks.codes[:, :16], blocks.codes[:, 16:]
        return torch.cat((blocks.halves.view(torch.uint8), low | high << 4), dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        return blocks.halves.float() * VALUES[blocks.codes.long()]

    def fit(self, x: torch.Tensor) -> Blocks:
        scale = x.gather(1, x.abs().argmax(1, keepdim=True)) / VALUES[0]
        inverse = 1 / scale  # of the scale before it is fp16
        inverse = torch.where(inverse.isfinite(), inverse, 0)
        codes = torch.bucketize((x * inverse).contiguous(), _MIDPOINTS).to(torch.uint8)
        return Blocks(codes, scale.to(torch.float16), codes[:, :0])
