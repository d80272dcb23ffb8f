"""K-quants of 2 and 3 bits: superblocks of 256 inputs with a small scale for 16 of them.

Source: ``block_q2_K``, ``block_q3_K`` of ggml (``ggml-common.h``). In both, of each 128 codes the
low 2 bits of number 32 j + i are in byte i at bit 2 j.
"""

from __future__ import annotations

import torch

from .base import GGUF, Blocks
from .kquants import Affine
from .search import fit_symmetric

_SHIFTS = torch.arange(8, dtype=torch.uint8, device="cpu")
_TWOS = _SHIFTS[0:4, None] * 2


def unpack_twos(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [B, 64] -> [B, 256]."""
    return (raw.reshape(-1, 2, 1, 32) >> _TWOS & 3).view(-1, 256)


def pack_twos(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of ``unpack_twos``."""
    return ((codes.view(-1, 2, 4, 32) & 3) << _TWOS).sum(2, dtype=torch.uint8).view(-1, 64)


class Q2K(Affine):
    """Q2_K: ``w = d * sc * code - dmin * m``, ``sc`` and ``m`` of 4 bits for 16 inputs.

    A stored superblock: 16 bytes, ``sc`` in their low halves and ``m`` in the high ones; 64 bytes
    with the codes; fp16 ``d``, ``dmin``. ``small`` is those 16 bytes, packed too.
    """

    name, bits, levels = "q2_k", 2, 3
    error = "0.5 of the widest range (0 included) of a superblock's groups, and 6e-5 (fp16 scales)"
    groups, most = 16, 15
    share = 0.5
    stored_bytes, halves_at, halves, small = 84, slice(80, 84), 2, 16
    grids = tuple(i / 10 for i in range(-5, 11))

    def split(self, raw: torch.Tensor) -> Blocks:
        return Blocks(unpack_twos(raw[:, 16:80]), self.stored_halves(raw), raw[:, :16].contiguous())

    def join(self, blocks: Blocks) -> torch.Tensor:
        parts = (blocks.small, pack_twos(blocks.codes), blocks.halves.view(torch.uint8))
        return torch.cat(parts, dim=1)

    def joined(self, sc: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return sc | m << 4

    def parted(self, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return small & 15, small >> 4


class Q3K(GGUF):
    """Q3_K: ``w = d * sc * (code - 4)`` with a signed ``sc`` of 6 bits for 16 inputs.

    A stored superblock: 32 bytes whose bit ``j`` of number i is bit 2 of code 32 j + i; 64 bytes
    with the low 2 bits; 12 bytes with the 16 ``sc + 32``, the low 4 bits of number i in byte
    ``i % 8``, half ``i // 8``, the high 2 in byte ``8 + i % 4`` at bit ``i // 4 * 2``; fp16 ``d``.
    ``small`` is sc in two's complement.
    """

    name, bits = "q3_k", 3
    error = "0.28 of the amax of a superblock, and 7e-5 (fp16 scales)"
    share, floor = 0.28, 7e-5
    k_multiple = k_block = 256
    int8_kind = "q8_k"
    stored_bytes, halves_at, halves, small = 110, slice(108, 110), 1, 16
    grids = tuple(i / 10 for i in range(10))

    def split(self, raw: torch.Tensor) -> Blocks:
        high = (raw[:, None, :32] >> _SHIFTS[:, None] & 1).reshape(-1, 256)
        codes = unpack_twos(raw[:, 32:96]) | high << 2
        low, upper = raw[:, 96:104], raw[:, 104:108]
        steps = torch.cat((low & 15, low >> 4), dim=1)
        steps |= (upper[:, None] >> _TWOS & 3).view(-1, 16) << 4
        return Blocks(codes, self.stored_halves(raw), steps - 32)

    def join(self, blocks: Blocks) -> torch.Tensor:
        high = blocks.codes.view(-1, 8, 32) >> 2 << _SHIFTS[:, None]
        steps = blocks.small + 32
        upper = (steps.view(-1, 4, 4) >> 4 << _TWOS).sum(1, dtype=torch.uint8)
        parts = (
            high.sum(1, dtype=torch.uint8),
            pack_twos(blocks.codes),
            steps[:, :8] & 15 | (steps[:, 8:] & 15) << 4,
            upper,
            blocks.halves.view(torch.uint8),
        )
        return torch.cat(parts, dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        codes = blocks.codes.view(torch.int8).view(-1, 16, 16) - 4
        return (self._scales(blocks) * codes).view(-1, 256)

    def fit(self, x: torch.Tensor) -> Blocks:
        groups = x.view(-1, 16, 16)
        scale = fit_symmetric(groups, 4, self.grids)  # [B, 16]
        peak = scale.gather(1, scale.abs().argmax(1, keepdim=True))
        halves = (peak / -32).to(torch.float16)
        nearest = torch.where(halves != 0, scale / halves.float(), 0).round()
        best = torch.full_like(scale, torch.inf)
        codes, small = groups, nearest
        for other in (0, -1, 1):  # a step apart often rounds better where steps are few
            steps = (nearest + other).clamp(-32, 31)
            step = (steps * halves.float())[..., None]
            tried = torch.where(step != 0, groups / step, 0).round().clamp(-4, 3)
            error = (step * tried - groups).square().sum(2)
            better = error < best
            best = torch.where(better, error, best)
            small = torch.where(better, steps, small)
            codes = torch.where(better[..., None], tried + 4, codes)
        return Blocks(
            codes.to(torch.uint8).view(-1, 256), halves, small.to(torch.int8).view(torch.uint8)
        )

    @staticmethod
    def _scales(blocks: Blocks) -> torch.Tensor:
        """The scale of every group, float32 [B, 16, 1]."""
        return (blocks.small.view(torch.int8) * blocks.halves.float())[..., None]
