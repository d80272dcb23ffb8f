"""Scratch of ``hopper.mla_decode``: the splits' results in tiles, and the launch that combines."""

from __future__ import annotations

import torch
import triton

from ..common.launch import early_launch, launches_early


class TilePartials:
    """Scratch of one call, as ``split_kv.Partials``, of the warp-specialised kernel.

    Attributes:
        values: float16 [total_splits, tiles of 64 rows, 2 halves of the columns, 64 lines, 256], or
            the result itself if not ``split``. Line 8 * g + n of a half is of the rows 8 * g to
            8 * g + 7 and of 32 columns from 32 * n on: [row, lane of 4, tile of 8 columns, 2].
        lse: float32 [total_splits, tiles, 3, 64]: log-sum-exps of the rows, base 2, and the powers
            of two that make ``values`` the result again, by half.
    """

    def __init__(self, out: torch.Tensor, total_splits: int) -> None:
        """out: [B, R, 512], contiguous; it is what ``combine`` fills."""
        B, R, _ = out.shape
        self.out, self.total_splits, self.split = out, total_splits, total_splits > B
        self.tiles = triton.cdiv(R, 64)
        self.batch = max(32, triton.next_power_of_2(B))
        self.early = launches_early(out.device)
        self.launch = early_launch(self.early)
        shape, device = (total_splits, self.tiles), out.device
        self.lse = torch.empty(
            (*shape, 3, 64) if self.split else (1,), dtype=torch.float32, device=device
        )
        self.values = out
        if self.split:
            self.values = torch.empty(*shape, 2, 64, 256, dtype=torch.float16, device=device)

    def combine(self, lengths: torch.Tensor, S: int, window: None, keys: int) -> None:
        """``out`` from the partial results; nothing to do if there is one split a sequence.

        Args:
            lengths, S, window, keys: as the decode kernel had them.
        """
        from .hopper import mla_split_kv as combining  # Gluon: not in the interpreter

        B, R, _ = self.out.shape
        if not self.split:
            return
        # Most sequences' splits in one go. Five sizes at most are compiled.
        block = min(128, max(8, triton.next_power_of_2(self.total_splits // B)))
        lines = combining.LINES_SPLITS // block
        combining.mla_combine[(B * self.tiles * 8, 16 // lines)](
            self.values, self.lse, self.out, lengths, B, R, self.tiles, self.total_splits, S,
            LINES=lines, BLOCK=block, BATCH=self.batch,
            num_warps=combining.WARPS, **self.launch,
        )  # fmt: skip
