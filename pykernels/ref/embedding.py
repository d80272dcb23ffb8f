"""The embedding gather in plain torch."""

from __future__ import annotations

import torch


def embed(ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows [..., H] of ``table`` [V, H] times ``scale``; rows of NaN for ids outside ``0..V-1``."""
    inside = (ids >= 0) & (ids < len(table))
    rows = table[ids.clamp(0, len(table) - 1)]
    rows = rows if scale == 1 else (rows.float() * scale).to(rows.dtype)
    return rows.masked_fill(~inside.unsqueeze(-1), torch.nan)
