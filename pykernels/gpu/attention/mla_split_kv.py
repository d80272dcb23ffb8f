"""Scratch of ``hopper.mla_decode``: the splits' results in tiles, and the launch that combines."""

from __future__ import annotations

import torch
import triton

from .split_kv import Partials


class TilePartials(Partials):
    """``Partials`` of the warp-specialised kernel, for ``out`` [B, R, 512].

    Attributes:
        values: float16 [total_splits, tiles of 64 rows, 2 halves of the columns, 64 lines, 256], or
            the result itself if not ``split``. Line 8 * g + n of a half is of the rows 8 * g to
            8 * g + 7 and of 32 columns from 32 * n on: [row, lane of 4, tile of 8 columns, 2].
        lse: float32 [total_splits, tiles, 3, 64]: log-sum-exps of the rows, base 2, and the powers
            of two that make ``values`` the result again, by half.
    """

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.out.shape[1], 64)

    def _allocate(self) -> None:
        shape, device = (self.total_splits, self.tiles), self.out.device
        self.lse = torch.empty(*shape, 3, 64, dtype=torch.float32, device=device)
        self.values = torch.empty(*shape, 2, 64, 256, dtype=torch.float16, device=device)

    def _combine(self, lengths: torch.Tensor, S: int, window: int | None, keys: int) -> None:
        from .hopper import mla_split_kv as combining  # Gluon: not in the interpreter

        B, R, _ = self.out.shape
        lines = combining.LINES_SPLITS // self.block
        combining.mla_combine[(B * self.tiles * 8, 16 // lines)](
            self.values,
            self.lse,
            self.out,
            lengths,
            B,
            R,
            self.tiles,
            self.total_splits,
            S,
            LINES=lines,
            BLOCK=self.block,
            BATCH=self.batch,
            num_warps=combining.WARPS,
            **self.launch,
        )
