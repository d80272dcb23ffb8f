"""K-quants: 4, 5 and 6 bits in superblocks of 256 inputs, scales that are quantized themselves.

Source: ``block_q4_K``, ``block_q5_K``, ``block_q6_K`` of ggml (``ggml-common.h``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import GGUF, Blocks
from .search import fit_affine, fit_symmetric

_SHIFTS = torch.arange(8, dtype=torch.uint8, device="cpu")


class Affine(GGUF):
    """Superblocks of 256 inputs: ``w = d * sc * code - dmin * m``.

    ``small`` is what ``joined`` makes of the groups' sc and m: these in turns.

    Attributes:
        groups: of a superblock, each with an ``sc`` and an ``m``.
        most: the largest of these.
        levels: the largest code.
        grids: of ``search.fit_affine``.
    """

    k_multiple = k_block = 256
    int8_kind = "q8_k"
    floor = 6e-5
    groups: int
    most: int
    levels: int
    grids: Sequence[float]

    def values(self, blocks: Blocks) -> torch.Tensor:
        scale, low = self._scales(blocks)
        return (scale * blocks.codes.view(-1, self.groups, 256 // self.groups) - low).view(-1, 256)

    def fit(self, x: torch.Tensor) -> Blocks:
        groups = x.view(-1, self.groups, 256 // self.groups)
        fitted = fit_affine(groups, self.levels, self.grids)  # scale, low: [B, groups]
        halves = torch.stack([s.amax(1) / self.most for s in fitted], dim=1).to(torch.float16)
        steps = [
            torch.where(d > 0, s / d, 0).round().clamp(0, self.most).to(torch.uint8)
            for s, d in zip(fitted, halves.float().T[..., None], strict=True)
        ]
        small = self.joined(*steps)
        scale, low = self._scales(Blocks(x, halves, small))
        codes = torch.where(scale > 0, (groups + low) / scale, 0).round().clamp(0, self.levels)
        return Blocks(codes.to(torch.uint8).view(-1, 256), halves, small)

    def _scales(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, low) of every group, float32 [B, groups, 1]."""
        d, low = blocks.halves.float()[..., None].unbind(1)  # [B, 1]
        sc, m = self.parted(blocks.small)
        return (sc * d)[..., None], (m * low)[..., None]

    def joined(self, sc: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """uint8 [B, groups] each -> ``Blocks.small``."""
        return torch.stack((sc, m), dim=2).view(-1, self.small)

    def parted(self, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of ``joined``."""
        sc, m = small.view(-1, self.groups, 2).unbind(2)
        return sc, m


class AffineK(Affine):
    """Q4_K and Q5_K: ``w = d * sc * code - dmin * m``, ``sc`` and ``m`` of 6 bits for 32 inputs.

    A stored superblock: fp16 ``d``, ``dmin``; 12 bytes with 8 ``sc`` and 8 ``m``; for 5 bits, 32
    bytes whose bit ``g`` is bit 4 of group g's codes; 128 bytes with the low 4 bits, group 2 i in
    the low halves of 32 bytes and group 2 i + 1 in the high ones.

    Args:
        bits: 4 or 5.
    """

    groups, most = 8, 63
    halves_at, halves, small = slice(0, 4), 2, 16

    def __init__(self, bits: int) -> None:
        self.name, self.bits, self.levels = f"q{bits}_k", bits, (1 << bits) - 1
        self.stored_bytes = 16 + 32 * bits
        self.share = 1.5 / self.levels
        self.error = (
            f"1.5 / {self.levels} of the widest range (0 included) of a superblock's groups, "
            "and 6e-5 (fp16 scales)"
        )
        self.grids = [i / 10 for i in (range(-10, 11) if bits == 4 else range(-5, 11))]

    def split(self, raw: torch.Tensor) -> Blocks:
        halves = self.stored_halves(raw)
        a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
        sc = torch.cat((a & 63, c & 15 | a >> 6 << 4), dim=1)  # [B, 8]
        m = torch.cat((b & 63, c >> 4 | b >> 6 << 4), dim=1)
        low = raw[:, -128:].reshape(-1, 4, 1, 32)
        codes = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
        if self.bits == 5:
            codes |= (raw[:, 16:48, None] >> _SHIFTS & 1).transpose(1, 2) << 4
        return Blocks(codes.view(-1, 256), halves, self.joined(sc, m))

    def join(self, blocks: Blocks) -> torch.Tensor:
        sc, m = self.parted(blocks.small)
        a, b = (s[:, :4] | s[:, 4:] >> 4 << 6 for s in (sc, m))
        c = sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4
        codes = blocks.codes.view(-1, 8, 32)
        parts = [blocks.halves.view(torch.uint8), a, b, c]
        if self.bits == 5:
            parts.append((codes.transpose(1, 2) >> 4 << _SHIFTS).sum(2, dtype=torch.uint8))
        parts.append((codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(-1, 128))
        return torch.cat(parts, dim=1)


class Q6K(GGUF):
    """Q6_K: ``w = d * sc * (code - 32)`` with an int8 ``sc`` for 16 inputs.

    A stored superblock: 128 bytes with the low 4 bits of the codes, 64 with the high 2, int8 [16]
    ``sc``, fp16 ``d``. Of each 128 codes, 32 l + i has its low bits in byte ``32 (l % 2) + i``, low
    or high half ``l // 2``, and its high bits in byte i at bit 2 l.
    """

    name, bits = "q6_k", 6
    error = "1 / 32 of the amax of a superblock, and 1.3e-4 (fp16 scales)"
    share, floor = 1 / 32, 1.3e-4
    k_multiple = k_block = 256
    int8_kind = "q8_k"
    stored_bytes, halves_at, halves, small = 210, slice(208, 210), 1, 16
    grids = tuple(i / 10 for i in range(-9, 10))

    def split(self, raw: torch.Tensor) -> Blocks:
        low = raw[:, :128].reshape(-1, 2, 1, 64)
        high = raw[:, 128:192].reshape(-1, 2, 1, 32)
        codes = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
        codes |= (high >> _SHIFTS[0::2, None] & 3) << 4
        halves = self.stored_halves(raw)
        return Blocks(codes.view(-1, 256), halves, raw[:, 192:208].contiguous())

    def join(self, blocks: Blocks) -> torch.Tensor:
        codes = blocks.codes.view(-1, 2, 4, 32)
        low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(-1, 128)
        high = (codes >> 4 << _SHIFTS[0::2, None]).sum(2, dtype=torch.uint8).view(-1, 64)
        return torch.cat((low, high, blocks.small, blocks.halves.view(torch.uint8)), dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        codes = blocks.codes.view(torch.int8).view(-1, 16, 16) - 32
        return (self._scales(blocks) * codes).view(-1, 256)

    def fit(self, x: torch.Tensor) -> Blocks:
        groups = x.view(-1, 16, 16)
        scale = fit_symmetric(groups, 32, self.grids)  # [B, 16]
        peak = scale.gather(1, scale.abs().argmax(1, keepdim=True))
        halves = (peak / -128).to(torch.float16)
        steps = torch.where(halves != 0, scale / halves.float(), 0).round().clamp(-128, 127)
        small = steps.to(torch.int8).view(torch.uint8)
        step = self._scales(Blocks(x, halves, small))
        codes = torch.where(step != 0, groups / step, 0).round().clamp(-32, 31) + 32
        return Blocks(codes.to(torch.uint8).view(-1, 256), halves, small)

    @staticmethod
    def _scales(blocks: Blocks) -> torch.Tensor:
        """The scale of every group, float32 [B, 16, 1]."""
        return (blocks.small.view(torch.int8) * blocks.halves.float())[..., None]
