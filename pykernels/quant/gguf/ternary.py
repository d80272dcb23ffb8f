"""TQ1_0, TQ2_0, Q2_0 and Q1_0: weights of -1, 0 and 1 times one fp16 scale a block.

Source: ``block_tq1_0``, ``block_tq2_0``, ``block_q2_0``, ``block_q1_0`` of ggml
(``ggml-common.h``). In memory a code has 2 bits, and a scale that kernels would have to look for
stands there twice.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from .base import GGUF, Blocks
from .grid_types import sign_bits
from .kquants_low import pack_twos, unpack_twos

_POWERS = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device="cpu")
_EIGHT = torch.arange(8, dtype=torch.uint8, device="cpu")
_TWOS = _EIGHT[:4] * 2


class Ternary(GGUF):
    """``w = d * (code - 1)``. Quantized as ggml does, bit for bit."""

    bits = 2
    small = 0
    error = "half the amax of a block, 2**-11 of it, and 2**-25 (fp16 scales)"
    share, floor = 0.5 * (1 + 2**-10), 2**-25

    @abstractmethod
    def split_codes(self, raw: torch.Tensor) -> torch.Tensor:
        """uint8 [B, stored_bytes] -> codes [B, k_multiple]."""

    @abstractmethod
    def join_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """The inverse of ``split_codes``, without the scale."""

    def split(self, raw: torch.Tensor) -> Blocks:
        halves = self.stored_halves(raw).repeat(1, self.halves)
        return Blocks(self.split_codes(raw), halves, raw[:, :0])

    def join(self, blocks: Blocks) -> torch.Tensor:
        d, codes = (
            blocks.halves[:, :1].contiguous().view(torch.uint8),
            self.join_codes(blocks.codes),
        )
        return torch.cat((d, codes) if self.halves_at.start == 0 else (codes, d), dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        return blocks.halves[:, :1].float() * (blocks.codes.float() - 1)

    def fit(self, x: torch.Tensor) -> Blocks:
        d = x.abs().amax(1, keepdim=True)
        inverse = torch.where(d > 0, 1 / d, 0).nan_to_num(posinf=0)
        size = (x * inverse).abs()
        size = size.floor() + (2 * (size - size.floor())).floor()  # ties away from 0
        codes = (torch.where(x < 0, -size, size) + 1).to(torch.uint8)
        return Blocks(codes, d.to(torch.float16).repeat(1, self.halves), codes[:, :0])


class TQ10(Ternary):
    """TQ1_0. A stored superblock of 256 inputs: 48 bytes of 5 codes, 4 of 4 codes; fp16 ``d``.

    A byte is ``256 / 243`` of its codes as digits to the base 3, rounded up, the first the highest.
    Inputs ``32 n + i`` up to 160 are digit n of byte i; ``160 + 16 n + i`` up to 240 those of byte
    ``32 + i``; ``240 + 4 n + i`` those of byte ``48 + i``. Bytes of no such codes come back as the
    one that means the same.
    """

    name = "tq1_0"
    int8_kind = "q8_k"
    k_multiple = k_block = 256
    stored_bytes, halves_at, halves = 54, slice(52, 54), 2

    def split_codes(self, raw: torch.Tensor) -> torch.Tensor:
        parts = (_digits(raw[:, :32], 5), _digits(raw[:, 32:48], 5), _digits(raw[:, 48:52], 4))
        return torch.cat(parts, dim=1)

    def join_codes(self, codes: torch.Tensor) -> torch.Tensor:
        parts = codes[:, :160], codes[:, 160:240], codes[:, 240:]
        bytes_ = [_undigits(p, n) for p, n in zip(parts, (5, 5, 4), strict=True)]
        return torch.cat(bytes_, dim=1)


class TQ20(Ternary):
    """TQ2_0. A stored superblock of 256 inputs: 64 bytes with the codes as of Q2_K; fp16 ``d``."""

    name = "tq2_0"
    int8_kind = "q8_k"
    k_multiple = k_block = 256
    stored_bytes, halves_at, halves = 66, slice(64, 66), 2

    def split_codes(self, raw: torch.Tensor) -> torch.Tensor:
        return unpack_twos(raw[:, :64])

    def join_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack_twos(codes)


class Q20(Ternary):
    """Q2_0. A stored block of 64 inputs: fp16 ``d``; 16 bytes, of each 4 codes the first lowest.
    Code 3, which stands for 2, is read but not written."""

    name = "q2_0"
    int8_kind = "q8"
    k_multiple = 64
    stored_bytes, halves_at, halves = 18, slice(0, 2), 2

    def split_codes(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw[:, 2:, None] >> _TWOS & 3).view(-1, 64)

    def join_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes.view(-1, 16, 4) << _TWOS).sum(2, dtype=torch.uint8)


class Q10(Ternary):
    """Q1_0: codes 0 and 2. A stored block of 128 inputs: fp16 ``d``, the mean of their magnitudes;
    16 bytes whose bits, the lowest first, say which weights are at least 0."""

    name = "q1_0"
    int8_kind = "q8"
    k_multiple = 128
    stored_bytes, halves_at, halves = 18, slice(0, 2), 1
    error = "the amax of a block, and 2**-25 (fp16 scales)"
    share = 1.0

    def split_codes(self, raw: torch.Tensor) -> torch.Tensor:
        return sign_bits(raw[:, 2:]) << 1

    def join_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes.view(-1, 16, 8) >> 1 << _EIGHT).sum(2, dtype=torch.uint8)

    def fit(self, x: torch.Tensor) -> Blocks:
        d = x.abs().cumsum(1)[:, -1:] / 128  # in ggml's order
        codes = (x >= 0).to(torch.uint8) << 1
        return Blocks(codes, d.to(torch.float16), codes[:, :0])


def _digits(raw: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 [B, n] -> [B, count * n]: all first digits, then the second ones .."""
    digits = (raw[:, None].int() * _POWERS[:count, None] & 255) * 3 >> 8
    return digits.to(torch.uint8).view(len(raw), -1)


def _undigits(codes: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of ``_digits``."""
    digits = codes.view(len(codes), count, -1).int() * _POWERS.flip(0)[:count, None]
    return ((digits.sum(1) * 256 + 242) // 243).to(torch.uint8)
