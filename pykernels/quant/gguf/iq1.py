"""IQ1_S and IQ1_M: grid points of 8 weights of -1, 0 and 1, all moved by an eighth up or down.

Source: ``block_iq1_s``, ``block_iq1_m`` of ggml (``ggml-common.h``). In memory an IQ1_S code has 2
bits, and what a group is moved by is its minimum; in IQ1_M, which moves 8 weights at a time, it is
bit 2 of each code.
"""

from __future__ import annotations

import torch

from . import grids
from .base import GGUF, Blocks

VALUES = torch.tensor([-7, 1, 9, 0, -9, -1, 7, 0], dtype=torch.float32, device="cpu")
"""float32 [8]: what each code of IQ1_M stands for, in eighths."""

_THREES = torch.arange(0, 12, 3, dtype=torch.int32, device="cpu")
_STEPS = torch.arange(0, 16, 4, dtype=torch.int32, device="cpu")
_HALVES = torch.tensor([0, 4], dtype=torch.int32, device="cpu")


class _IQ1(GGUF):
    """``w = d * sc * (point - 1 +- 1 / 8)`` with an odd ``sc`` from 1 to 15 for each group.

    Attributes:
        groups: of a superblock.
        alone: whether each 8 weights of a group move on their own.
        tried: scales that ``fit`` tries, over the one that takes a group's largest weight to the
            largest value.
    """

    int8_kind = "q8_k"
    k_multiple = k_block = 256
    share, floor = 1.3, 2e-5
    error = "1.3 of the amax of a superblock, and 2e-5 (fp16 scales)"
    groups: int
    alone: bool
    tried: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)

    def fit(self, x: torch.Tensor) -> Blocks:
        wanted = x.view(len(x), self.groups, -1, 8)
        top = x.view(len(x), self.groups, -1).abs().amax(2)[..., None, None] / 1.125
        scale, best = top, torch.full_like(top, torch.inf)
        for share in self.tried:
            points, down = self._nearest(wanted, top * share)
            seen = _seen(points, down)
            square = seen.square().sum((2, 3), keepdim=True)
            fitted = (seen * wanted).sum((2, 3), keepdim=True) / square
            error = (fitted * seen - wanted).square().sum((2, 3), keepdim=True)
            better = (error < best) & (fitted > 0)
            best = torch.where(better, error, best)
            scale = torch.where(better, fitted, scale)
        halves = (scale.flatten(1).amax(1, keepdim=True) / 15).to(torch.float16)  # [B, 1]
        step = halves.float()[..., None, None]
        near = torch.where(step != 0, scale / step, 1)
        small = ((near - 1) / 2).round().clamp(0, 7) * 2 + 1  # [B, groups, 1, 1]
        points, down = self._nearest(wanted, step * small)
        return self._parts(points.flatten(1), down.flatten(1), halves, small.flatten(1).byte())

    def _nearest(
        self, wanted: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of points and whether they move down, int64, bool [B, groups, eights], near
        ``wanted`` [B, groups, eights, 8] over ``scale`` [B, groups, 1, 1]."""
        steps = torch.where(scale != 0, wanted / scale, 0)
        edges = torch.tensor([-0.5, 0.5], dtype=torch.float32, device="cpu")
        found, errors = [], []
        for delta in (0.125, -0.125):
            points = grids.IQ1.index_of(torch.bucketize((steps - delta).contiguous(), edges))
            seen = grids.IQ1.levels[points].float() - 1 + delta
            error = (seen - steps).square().sum(3)
            found.append(points)
            errors.append(error if self.alone else error.sum(2, keepdim=True).expand_as(error))
        down = errors[1] < errors[0]
        return torch.where(down, found[1], found[0]), down

    def _parts(
        self, points: torch.Tensor, down: torch.Tensor, d: torch.Tensor, sc: torch.Tensor
    ) -> Blocks:
        """Blocks of points int64 [B, 32], moves bool [B, 32], fp16 [B, 1], uint8 [B, groups]."""
        raise NotImplementedError


def _seen(points: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What points stand for, in their scale: float32 [..., 8]."""
    return grids.IQ1.levels[points].float() - 1 + torch.where(down, -0.125, 0.125)[..., None]


class IQ1S(_IQ1):
    """IQ1_S: a scale for 32 inputs, which move together.

    A stored superblock: fp16 ``d``; 32 bytes with the low 8 bits of the points; for each 32 inputs
    a word of 16 bits: the high 3 bits of 4 points, ``(sc - 1) / 2`` of 3 bits, and 1 for down.
    ``small`` is, in turns, what multiplies codes of 0, 1 and 2, and what comes off them: ``8 sc``
    and ``sc * (8 -+ 1)``, of ``d / 8``; ``halves`` is d twice.
    """

    name, bits = "iq1_s", 2
    groups, alone = 8, False
    stored_bytes, halves_at, halves, small = 50, slice(0, 2), 2, 16

    def split(self, raw: torch.Tensor) -> Blocks:
        words = raw[:, 34:].contiguous().view(torch.int16).int()  # [B, 8]
        high = (words[..., None] >> _THREES & 7).view(-1, 32)
        points = raw[:, 2:34].long() | high << 8
        down = (words < 0).repeat_interleave(4, 1)
        return self._parts(points, down, self.stored_halves(raw), 2 * (words >> 12 & 7).byte() + 1)

    def _parts(
        self, points: torch.Tensor, down: torch.Tensor, d: torch.Tensor, sc: torch.Tensor
    ) -> Blocks:
        low = sc * torch.where(down[:, ::4], 9, 7).byte()
        small = torch.stack((8 * sc, low), dim=2).view(-1, 16)
        return Blocks(grids.IQ1.levels[points].view(-1, 256), d.repeat(1, 2), small)

    def join(self, blocks: Blocks) -> torch.Tensor:
        points = grids.IQ1.index_of(blocks.codes.view(-1, 32, 8))
        sc, low = blocks.small.int().view(-1, 8, 2).unbind(2)
        high = ((points.int() >> 8).view(-1, 8, 4) << _THREES).sum(2, dtype=torch.int32)
        words = high | sc >> 4 << 12 | (low > sc).int() << 15
        parts = (
            blocks.halves[:, :1].contiguous().view(torch.uint8),
            points.byte(),
            words.to(torch.int16).view(torch.uint8),
        )
        return torch.cat(parts, dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        sc, low = blocks.small.float().view(-1, 8, 2, 1).unbind(2)
        whole = sc * blocks.codes.view(-1, 8, 32) - low  # integers
        return (blocks.halves[:, :1, None].float() / 8 * whole).view(-1, 256)


class IQ1M(_IQ1):
    """IQ1_M: a scale for 16 inputs, of which each 8 move on their own.

    A stored superblock: 32 bytes with the low 8 bits of the points; 16 with the high 3 bits of two
    each, in halves whose highest bit is 1 for down; 4 words of 16 bits, each with 4 ``(sc - 1) /
    2`` of 3 bits and 4 bits of fp16 ``d``.
    """

    name, bits = "iq1_m", 3
    groups, alone = 16, True
    stored_bytes, halves_at, halves, small = 56, slice(48, 56), 1, 16

    def stored_halves(self, raw: torch.Tensor) -> torch.Tensor:
        bits = (self._words(raw) >> 12 & 15) << _STEPS
        return bits.sum(1, keepdim=True).to(torch.int16).view(torch.float16)

    def split(self, raw: torch.Tensor) -> Blocks:
        high = (raw[:, 32:48, None].int() >> _HALVES & 15).view(-1, 32)
        points = raw[:, :32].long() | (high & 7) << 8
        steps = (self._words(raw)[..., None] >> _THREES & 7).view(-1, 16)
        return self._parts(points, high > 7, self.stored_halves(raw), (2 * steps + 1).byte())

    def _parts(
        self, points: torch.Tensor, down: torch.Tensor, d: torch.Tensor, sc: torch.Tensor
    ) -> Blocks:
        codes = grids.IQ1.levels[points] | down[..., None].byte() << 2
        return Blocks(codes.view(-1, 256), d, sc)

    def join(self, blocks: Blocks) -> torch.Tensor:
        eights = blocks.codes.view(-1, 32, 8)
        points = grids.IQ1.index_of(eights & 3)
        high = (points.int() >> 8 | (eights[..., 0].int() >> 2) << 3).view(-1, 16, 2)
        steps = (blocks.small.int() >> 1 & 7).view(-1, 4, 4) << _THREES
        d = blocks.halves.view(torch.int16).int() >> _STEPS & 15
        words = (steps.sum(2, dtype=torch.int32) | d << 12).to(torch.int16)
        parts = points.byte(), (high << _HALVES).sum(2).byte(), words.view(torch.uint8)
        return torch.cat(parts, dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        scales = blocks.halves.float() / 8 * blocks.small  # [B, 16], exact
        return (scales[..., None] * VALUES[blocks.codes.long()].view(-1, 16, 16)).view(-1, 256)

    @staticmethod
    def _words(raw: torch.Tensor) -> torch.Tensor:
        return raw[:, 48:].contiguous().view(torch.int16).int()
