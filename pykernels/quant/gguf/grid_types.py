"""What the IQ types of signs and grid points share.

A weight is a sign, a level that a ``Grid``'s point gives, and a scale. In memory a code is the sign
above the level: what a file's point says in 9 bits is 3 bits for each of 4 weights there, so that
kernels look 16 or 8 numbers up in a register and no grid. Nothing is lost, and ``join`` finds the
points again; the price is more bytes than the file has (``bits`` against ``stored_bytes``).
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from .base import GGUF, Blocks
from .grids import Grid

_SEVENS = torch.arange(0, 28, 7, dtype=torch.int32, device="cpu")
_EIGHT = torch.arange(8, dtype=torch.uint8, device="cpu")

SIGNS_OF_SEVEN = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)
"""uint8 [128]: the signs of 8 weights, an even number of minuses, by those of the first 7."""


def table_of(levels: tuple[int, ...], codes: int) -> torch.Tensor:
    """float32 [codes]: what each code stands for; codes that no level has are 0."""
    half = torch.zeros(codes // 2, dtype=torch.float32, device="cpu")
    half[: len(levels)] = torch.tensor(levels, dtype=torch.float32, device="cpu")
    return torch.cat((half, -half))


def nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [B, n] -> [B, 2 n]: the low half of each byte, then the high one."""
    return torch.stack((raw & 15, raw >> 4), dim=2).view(len(raw), -1)


def join_nibbles(halves: torch.Tensor) -> torch.Tensor:
    """The inverse of ``nibbles``."""
    return halves[:, 0::2] | halves[:, 1::2] << 4


def sign_bits(masks: torch.Tensor) -> torch.Tensor:
    """uint8 [B, n] -> [B, 8 n]: the bits of each byte, the lowest first."""
    return (masks[..., None] >> _EIGHT & 1).view(len(masks), -1)


def split_words(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of 7 signs for each 8 inputs below a scale's 4 bits, uint8 [B, 4 n] -> sign masks uint8
    [B, 4 n], scales uint8 [B, n]."""
    words = raw.flatten().clone().view(torch.int32).view(len(raw), -1)  # an aligned address
    seven = words[..., None] >> _SEVENS & 127
    masks = torch.from_numpy(SIGNS_OF_SEVEN)[seven.view(len(raw), -1)]
    return masks, (2 * (words >> 28 & 15) + 1).to(torch.uint8)


def join_words(masks: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_words``."""
    seven = (masks.int() & 127).view(len(masks), -1, 4)
    words = (seven << _SEVENS).sum(2, dtype=torch.int32) | small.int() >> 1 << 28
    return words.view(torch.uint8)


class GridType(GGUF):
    """``w = unit * d * sc * level`` and its sign, with an odd ``sc`` from 1 to 31 for each group.

    Attributes:
        grid: the points.
        level_values: what each level stands for, in units.
        table: float32 [2**bits]: what each code stands for, in units.
        unit: see above; a power of two.
        even: whether a file has 7 signs for 8 weights: the number of minuses is even.
        grids: scales that ``fit`` tries, over the one that takes a group's largest weight to the
            largest level.
    """

    grid: Grid
    level_values: tuple[int, ...]
    table: torch.Tensor
    unit: float
    even = False
    int8_kind = "q8_k"
    k_multiple = k_block = 256
    halves_at, halves = slice(0, 2), 1
    grids: tuple[float, ...] = (0.75, 0.85, 0.95, 1.0, 1.05, 1.15)

    @abstractmethod
    def split(self, raw: torch.Tensor) -> Blocks:
        """``Blocks.small`` is sc."""

    def codes_of(self, points: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """Codes uint8 [B, 256] of the points' numbers [B, n] and of sign masks uint8 [B, 32]."""
        levels = self.grid.levels[points.long()].view(-1, 256)
        return levels | sign_bits(masks) << self.bits - 1

    def points_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes uint8 [B, 256] -> int64 [B, n]: the points' numbers."""
        levels = codes & (1 << self.bits - 1) - 1
        return self.grid.index_of(levels.view(len(codes), -1, self.grid.levels.shape[1]))

    def masks_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes uint8 [B, 256] -> uint8 [B, 32]: sign masks."""
        signs = codes.view(-1, 32, 8) >> self.bits - 1
        return (signs << _EIGHT).sum(2, dtype=torch.uint8)

    def values(self, blocks: Blocks) -> torch.Tensor:
        scales = blocks.halves.float() * self.unit * blocks.small  # [B, groups], exact
        table = self.table[blocks.codes.long()].view(len(scales), scales.shape[1], -1)
        return (scales[..., None] * table).view(-1, 256)

    def fit(self, x: torch.Tensor) -> Blocks:
        signs = self._signs(x)
        wanted = torch.where(signs, -x, x).view(len(x), self.small, -1)  # below 0: a sign is wrong
        weight = wanted.square()
        top = wanted.amax(2, keepdim=True) / self.level_values[-1]
        scale, best = top, torch.full_like(top, torch.inf)
        for grid in self.grids:
            seen = self._seen(self._levels(wanted, top * grid))
            product = weight * seen
            fitted = (product * wanted).sum(2, keepdim=True) / (product * seen).sum(2, keepdim=True)
            error = (weight * (fitted * seen - wanted).square()).sum(2, keepdim=True)
            better = (error < best) & (fitted > 0)  # False for NaN: a group of zeros
            best = torch.where(better, error, best)
            scale = torch.where(better, fitted, scale)
        halves = (scale.amax(1) / 31 / self.unit).to(torch.float16)  # [B, 1]
        step = halves.float() * self.unit
        nearest = torch.where(step != 0, scale[..., 0] / step, 1)  # [B, groups]
        nearest = ((nearest - 1) / 2).round()
        best = torch.full_like(nearest, torch.inf)
        levels, small = torch.zeros_like(wanted, dtype=torch.uint8), nearest
        for other in (0, -1, 1):  # a step apart often rounds better
            tried = 2 * (nearest + other).clamp(0, 15) + 1
            found = self._levels(wanted, (step * tried)[..., None])
            seen = (step * tried)[..., None] * self._seen(found)
            error = (seen - wanted).square().sum(2)
            better = error < best
            best = torch.where(better, error, best)
            small = torch.where(better, tried, small)
            levels = torch.where(better[..., None], found, levels)
        codes = levels.view(-1, 256) | signs.to(torch.uint8) << self.bits - 1
        return Blocks(codes, halves, small.to(torch.uint8))

    def _signs(self, x: torch.Tensor) -> torch.Tensor:
        """bool [B, 256]: which weights are negative, or (``even``) the nearest that can be."""
        signs = x < 0
        if self.even:
            eights = signs.view(-1, 8)
            odd = eights.sum(1, keepdim=True) % 2 == 1
            least = x.view(-1, 8).abs().argmin(1, keepdim=True)
            eights.scatter_(1, least, eights.gather(1, least) ^ odd)
        return signs

    def _seen(self, levels: torch.Tensor) -> torch.Tensor:
        """What levels stand for, in units."""
        return self.table[levels.long()]

    def _levels(self, wanted: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """uint8 like ``wanted`` [B, groups, n]: levels of points that are near it over ``scale``
        [B, groups, 1]."""
        values = torch.tensor(self.level_values, dtype=torch.float32, device="cpu")
        steps = torch.where(scale != 0, wanted / scale, 0).contiguous()
        nearest = torch.bucketize(steps, (values[:-1] + values[1:]) / 2)
        dims = self.grid.levels.shape[1]
        points = self.grid.index_of(nearest.view(*wanted.shape[:2], -1, dims))
        return self.grid.levels[points].view(wanted.shape)
