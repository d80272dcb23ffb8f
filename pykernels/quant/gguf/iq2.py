"""IQ2_S, IQ2_XS and IQ2_XXS: grid points of 8 weights, 2.6 to 2.1 bits a weight in a file.

Source: ``block_iq2_s``, ``block_iq2_xs``, ``block_iq2_xxs`` of ggml (``ggml-common.h``). In memory
a code has 3 bits, of 6 integers.
"""

from __future__ import annotations

import torch

from . import grids
from .base import Blocks
from .grid_types import (
    SIGNS_OF_SEVEN,
    GridType,
    join_nibbles,
    join_words,
    nibbles,
    split_words,
    table_of,
)

LEVELS = 8, 25, 43
VALUES = table_of(LEVELS, 8)
"""float32 [8]: what each code stands for, in eighths."""

_TWOS = torch.arange(0, 8, 2, dtype=torch.int64, device="cpu")
_SIGNS = torch.from_numpy(SIGNS_OF_SEVEN)


class _IQ2(GridType):
    bits = 3
    level_values, table, unit = LEVELS, VALUES, 1 / 8
    grids = 0.8, 0.9, 1.0, 1.1, 1.25


class IQ2S(_IQ2):
    """IQ2_S: a scale for 16 inputs.

    A stored superblock: fp16 ``d``; 32 bytes with the low 8 bits of the points; 32 sign masks; 8
    bytes with the high 2 bits of the points; 16 scales of 4 bits, ``(sc - 1) / 2``.
    """

    name = "iq2_s"
    error = "0.8 of the amax of a superblock, and 2e-5 (fp16 scales)"
    share, floor = 0.8, 2e-5
    grid = grids.IQ2_S
    stored_bytes, small = 82, 16

    def split(self, raw: torch.Tensor) -> Blocks:
        high = (raw[:, 66:74, None].long() >> _TWOS & 3).view(-1, 32)
        codes = self.codes_of(raw[:, 2:34].long() | high << 8, raw[:, 34:66])
        return Blocks(codes, self.stored_halves(raw), 2 * nibbles(raw[:, 74:]) + 1)

    def join(self, blocks: Blocks) -> torch.Tensor:
        points = self.points_of(blocks.codes)
        parts = (
            blocks.halves.view(torch.uint8),
            points.to(torch.uint8),
            self.masks_of(blocks.codes),
            (points.view(-1, 8, 4) >> 8 << _TWOS).sum(2).to(torch.uint8),
            join_nibbles(blocks.small >> 1),
        )
        return torch.cat(parts, dim=1)


class IQ2XS(_IQ2):
    """IQ2_XS: a scale for 16 inputs.

    A stored superblock: fp16 ``d``; for each 8 inputs a word of 16 bits, the point in the low 9 and
    7 signs above them; 16 scales of 4 bits, ``(sc - 1) / 2``.
    """

    name, even = "iq2_xs", True
    error = "1.3 of the amax of a superblock (signs are not free), and 2e-5 (fp16 scales)"
    share, floor = 1.3, 2e-5
    grid = grids.IQ2_XS
    stored_bytes, small = 74, 16

    def split(self, raw: torch.Tensor) -> Blocks:
        low, high = raw[:, 2:66:2].long(), raw[:, 3:66:2].long()
        codes = self.codes_of(low | (high & 1) << 8, _SIGNS[high >> 1])
        return Blocks(codes, self.stored_halves(raw), 2 * nibbles(raw[:, 66:]) + 1)

    def join(self, blocks: Blocks) -> torch.Tensor:
        points, masks = self.points_of(blocks.codes), self.masks_of(blocks.codes)
        words = torch.stack((points & 255, points >> 8 | (masks.long() & 127) << 1), dim=2)
        parts = (
            blocks.halves.view(torch.uint8),
            words.to(torch.uint8).view(-1, 64),
            join_nibbles(blocks.small >> 1),
        )
        return torch.cat(parts, dim=1)


class IQ2XXS(_IQ2):
    """IQ2_XXS: a scale for 32 inputs.

    A stored superblock: fp16 ``d``; for each 32 inputs 4 bytes with the points, and a word as in
    IQ3_XXS.
    """

    name, even = "iq2_xxs", True
    error = "1.4 of the amax of a superblock (signs are not free), and 2e-5 (fp16 scales)"
    share, floor = 1.4, 2e-5
    grid = grids.IQ2_XXS
    stored_bytes, small = 66, 8

    def split(self, raw: torch.Tensor) -> Blocks:
        both = raw[:, 2:].reshape(-1, 8, 2, 4)
        masks, small = split_words(both[:, :, 1].reshape(-1, 32))
        points = both[:, :, 0].reshape(-1, 32)
        return Blocks(self.codes_of(points, masks), self.stored_halves(raw), small)

    def join(self, blocks: Blocks) -> torch.Tensor:
        points = self.points_of(blocks.codes).to(torch.uint8).view(-1, 8, 4)
        words = join_words(self.masks_of(blocks.codes), blocks.small).view(-1, 8, 4)
        both = torch.cat((points, words), dim=2).view(-1, 64)
        return torch.cat((blocks.halves.view(torch.uint8), both), dim=1)
