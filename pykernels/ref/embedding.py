"""The embedding gather in plain torch."""

from __future__ import annotations

import torch


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows [..., H] of ``table`` [V, H]; rows of NaN for ids outside ``0..V-1``."""
    inside = (ids >= 0) & (ids < len(table))
    rows = table[ids.clamp(0, len(table) - 1)]
    return rows.masked_fill(~inside.unsqueeze(-1), torch.nan)
