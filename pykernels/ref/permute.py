"""Tokens sorted by expert, in plain torch."""

from __future__ import annotations

import torch

from ..shapes import SortedPairs


def sort_pairs(ids: torch.Tensor, E: int) -> SortedPairs:
    """Pairs ordered by expert, those of one expert by token.

    Slot ``t * topk + k`` is token t's k-th expert. Ids outside ``0..E-1`` (experts that somebody
    else computes) come last, in pair order.

    Args:
        ids: int [T, topk].
        E: experts.
    """
    flat = ids.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= E), E, flat)
    pairs = flat.sort(stable=True).indices
    positions = torch.empty_like(pairs)
    positions[pairs] = torch.arange(len(pairs), dtype=torch.int64, device=ids.device)
    counts = torch.bincount(flat, minlength=E + 1)[:E]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return SortedPairs(pairs.int(), starts.int(), positions.int().view(ids.shape))


def permute(x: torch.Tensor, order: SortedPairs) -> torch.Tensor:
    """Row of the token of each sorted pair: [T, H] -> [T * topk, H]."""
    return x[order.pairs.long() // order.topk]


def unpermute(
    y: torch.Tensor,
    order: SortedPairs,
    weights: torch.Tensor,
    add: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Weighted sum of each token's rows of ``y``, and of ``add`` if given.

    Rows behind ``starts[E]`` (experts that somebody else computes) are not read, and whatever their
    weights are, they add nothing.

    Args:
        y: [T * topk, H], in sorted order.
        order: of the same pairs.
        weights: [T, topk].
        add: [T, H], the shared expert's output, say.
        dtype: of the arithmetic and of the result.

    Returns:
        [T, H] in ``dtype``.
    """
    positions = order.positions.long()  # [T, topk]
    here = (positions < order.starts[-1]).unsqueeze(-1)
    rows = y[positions].to(dtype) * weights.to(dtype).unsqueeze(-1)
    total = rows.masked_fill(~here, 0).sum(1)
    return total if add is None else total + add.to(dtype)
