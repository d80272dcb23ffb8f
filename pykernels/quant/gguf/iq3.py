"""IQ3_S and IQ3_XXS: grid points of 4 weights, 3.4 and 3.1 bits a weight in a file.

Source: ``block_iq3_s``, ``block_iq3_xxs`` of ggml (``ggml-common.h``). In memory a code
has 4 bits, of 16 integers.
"""

from __future__ import annotations

import torch

from . import grids
from .base import Blocks
from .grid_types import (
    GridType,
    join_nibbles,
    join_words,
    nibbles,
    sign_bits,
    split_words,
    table_of,
)

_EIGHT = torch.arange(8, dtype=torch.int64, device="cpu")

IQ3_S_LEVELS = tuple(range(1, 17, 2))
IQ3_S_VALUES = table_of(IQ3_S_LEVELS, 16)
"""float32 [16]: what each code stands for."""

IQ3_XXS_LEVELS = 2, 6, 10, 14, 18, 22, 26, 31
IQ3_XXS_VALUES = table_of(IQ3_XXS_LEVELS, 16)
"""float32 [16]: what each code stands for, in halves."""


class IQ3S(GridType):
    """IQ3_S: a scale for 32 inputs.

    A stored superblock: fp16 ``d``; 64 bytes with the low 8 bits of the points, 8 whose bits are
    bit 8 of them; 32 sign masks; 8 scales of 4 bits, ``(sc - 1) / 2``.
    """

    name, bits = "iq3_s", 4
    error = "0.5 of the amax of a superblock, and 3e-5 (fp16 scales)"
    share, floor = 0.5, 3e-5
    grid, level_values, table, unit = grids.IQ3_S, IQ3_S_LEVELS, IQ3_S_VALUES, 1.0
    stored_bytes, small = 110, 8

    def split(self, raw: torch.Tensor) -> Blocks:
        points = raw[:, 2:66].int() | sign_bits(raw[:, 66:74]).int() << 8
        codes = self.codes_of(points, raw[:, 74:106])
        return Blocks(codes, self.stored_halves(raw), 2 * nibbles(raw[:, 106:]) + 1)

    def join(self, blocks: Blocks) -> torch.Tensor:
        points = self.points_of(blocks.codes)
        high = (points.view(-1, 8, 8) >> 8 << _EIGHT).sum(2)
        parts = (
            blocks.halves.view(torch.uint8),
            points.to(torch.uint8),
            high.to(torch.uint8),
            self.masks_of(blocks.codes),
            join_nibbles(blocks.small >> 1),
        )
        return torch.cat(parts, dim=1)


class IQ3XXS(GridType):
    """IQ3_XXS: a scale for 32 inputs.

    A stored superblock: fp16 ``d``; 64 bytes with the points; for each 32 inputs a word of 32 bits:
    7 signs for each 8 inputs, and in the highest 4 bits ``(sc - 1) / 2``.
    """

    name, bits, even = "iq3_xxs", 4, True
    error = "1.2 of the amax of a superblock (signs are not free), and 3e-5 (fp16 scales)"
    share, floor = 1.2, 3e-5
    grid, level_values, table, unit = grids.IQ3_XXS, IQ3_XXS_LEVELS, IQ3_XXS_VALUES, 0.5
    stored_bytes, small = 98, 8

    def split(self, raw: torch.Tensor) -> Blocks:
        masks, small = split_words(raw[:, 66:])
        return Blocks(self.codes_of(raw[:, 2:66], masks), self.stored_halves(raw), small)

    def join(self, blocks: Blocks) -> torch.Tensor:
        parts = (
            blocks.halves.view(torch.uint8),
            self.points_of(blocks.codes).to(torch.uint8),
            join_words(self.masks_of(blocks.codes), blocks.small),
        )
        return torch.cat(parts, dim=1)
