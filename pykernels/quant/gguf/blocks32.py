"""Q4_0, Q4_1, Q5_0, Q5_1: 4 or 5 bits in blocks of 32 inputs with fp16 scales.

Source: ``block_q4_0``, ``block_q4_1``, ``block_q5_0``, ``block_q5_1`` of ggml (``ggml-common.h``).
"""

from __future__ import annotations

import torch

from .base import GGUF, Blocks

_SHIFTS = torch.arange(8, dtype=torch.uint8, device="cpu")


class Blocks32(GGUF):
    """``w = d * (code - middle)``, or ``w = d * code + m``. Quantized as ggml does, bit for bit.

    A stored block: fp16 ``d``, and ``m`` where there is one; for 5 bits, 4 bytes whose bit ``i`` is
    bit 4 of code i; 16 bytes with the low 4 bits, those of inputs 0 to 15 in the low halves.
    ``Blocks.halves`` has -m, what weights lie below ``d * code``, as the K-quants have it; codes of
    Q4_0 are ``code - 8`` in two's complement, as int4's.

    Args:
        bits: 4 or 5.
        minimum: whether blocks have an ``m``.
    """

    k_multiple = 32
    int8_kind = "q8"
    small = 0

    def __init__(self, bits: int, minimum: bool) -> None:
        self.name, self.bits, self.minimum = f"q{bits}_{minimum:d}", bits, minimum
        self.levels, self.middle = (1 << bits) - 1, 1 << bits - 1
        self.flipped = 8 if self.name == "q4_0" else 0  # bits of codes
        self.halves = 2 if minimum else 1
        self.halves_at = slice(0, 2 * self.halves)
        self.stored_bytes = 2 * self.halves + 4 * bits
        self.floor = (self.levels + 1) * 2.0 ** (-25 if minimum else -26) * 1.05
        floor = f"{self.floor:.1e} (fp16 scales)"
        if minimum:
            self.share = 0.5 / self.levels
            self.error = (
                f"half a step, 1 / {2 * self.levels} of a block's range, 2**-11 of that range and"
                f" of the least weight, and {floor}"
            )
        else:
            self.share = 1 / self.middle
            self.error = f"block amax / {self.middle} * 1.01, and {floor}"

    def split(self, raw: torch.Tensor) -> Blocks:
        low = raw[:, -16:]
        codes = torch.cat((low & 15, low >> 4), dim=1)
        if self.bits == 5:
            codes |= (raw[:, -20:-16, None] >> _SHIFTS & 1).view(-1, 32) << 4
        return Blocks(codes ^ self.flipped, self._negated(self.stored_halves(raw)), raw[:, :0])

    def join(self, blocks: Blocks) -> torch.Tensor:
        codes = blocks.codes ^ self.flipped
        parts = [self._negated(blocks.halves).view(torch.uint8)]
        if self.bits == 5:
            fifth = codes.view(-1, 4, 8) >> 4 << _SHIFTS
            parts.append(fifth.sum(2, dtype=torch.uint8))
        parts.append(codes[:, :16] & 15 | codes[:, 16:] << 4)
        return torch.cat(parts, dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        halves, codes = blocks.halves.float(), (blocks.codes ^ self.flipped).float()
        if self.minimum:
            return halves[:, :1] * codes - halves[:, 1:]
        return halves * (codes - self.middle)

    def fit(self, x: torch.Tensor) -> Blocks:
        if self.minimum:
            low = x.amin(1, keepdim=True)
            d, offset = (x.amax(1, keepdim=True) - low) / self.levels, 0.5
        else:  # the largest magnitude becomes code 0
            low = torch.zeros_like(x[:, :1])
            d = x.gather(1, x.abs().argmax(1, keepdim=True)) / -self.middle
            offset = self.middle + 0.5
        inverse = 1 / d  # of the scale before it is fp16
        inverse = torch.where(inverse.isfinite(), inverse, 0)
        codes = ((x - low) * inverse + offset).clamp(0, self.levels).to(torch.uint8)
        halves = torch.cat((d, -low), dim=1)[:, : self.halves].to(torch.float16)
        return Blocks(codes ^ self.flipped, halves, codes[:, :0])

    def _negated(self, halves: torch.Tensor) -> torch.Tensor:
        """m as -m and back; as integers, since arithmetic may quiet a NaN."""
        if not self.minimum:
            return halves
        signs = torch.tensor([0, -(1 << 15)], dtype=torch.int16, device="cpu")
        return (halves.view(torch.int16) ^ signs).view(torch.float16)
