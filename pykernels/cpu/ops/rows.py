"""Float rows as matrices read them, made on the calling thread."""

from __future__ import annotations

import numpy as np
import torch

from ...quant.layout import K_BLOCK, ceil_to
from ..activations.row_layout import row_bytes
from ..gemm.common import TILE
from ..moe.kernel import Routines
from ..norm import LAYOUT, NORM, make_norm
from .serial import Record, counted, run_tasks, scratch


def tile_steps(routines: Routines) -> int:
    """A tiles of 128 inputs."""
    return 2 if routines.int8 else 4


def make_rows(
    x: torch.Tensor, padded: int, routines: Routines, gemm: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x as tiles read it (``activations.row_layout``), and as the GEMM's A tiles, if it takes them.

    Args:
        x: float32 [M, K], contiguous.
        padded: K with what fills up its last block.
    """
    (M, K), how = x.shape, routines.row_formats[0]
    stride, steps, tiles = row_bytes(padded, how), tile_steps(routines), None
    rows = scratch(M * stride)
    if gemm:
        tiles = scratch(ceil_to(M, 32) // 16 * steps * (padded // K_BLOCK) * TILE)
    layout = Record(
        LAYOUT,
        rows=rows,
        stride=stride,
        K=padded,
        quantize_row=routines.quantize_row,
        tiles=tiles,
        tile_steps=steps,
        int8=routines.int8,
        interleave_a=routines.interleave_a,
    )
    record = Record(
        NORM,
        count_at=counted(M),
        x=x,
        x_stride=4 * K,
        H=K,
        chunk=1,
        scratch=np.empty(K, np.float32),
        layouts=layout,
        layout_count=1,
    )
    run_tasks(make_norm(), record.address)
    return rows, tiles
