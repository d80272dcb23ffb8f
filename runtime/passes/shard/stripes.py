"""Which tokens of a step are whose, where ranks share a prompt (OSDI'26 3.2).

The tokens of a step are cut into twice as many runs as there are ranks, and a rank has the r-th one
from the front and the r-th one from the end (zig-zag): with causal attention all ranks then have
about as much to do. Each has as many places; what is left over is padding, -1.
"""

from __future__ import annotations

import torch


def stripe_tokens(T: int, ranks: int) -> int:
    """Places of a rank in a step of T tokens."""
    return 2 * -(-T // (2 * ranks))


def stripes(T: int, ranks: int) -> torch.Tensor:
    """int64 [ranks, places]: the number of each rank's tokens in the step, in order; -1: none."""
    run = stripe_tokens(T, ranks) // 2
    runs = torch.arange(2 * ranks * run, dtype=torch.int64, device="cpu").view(2 * ranks, run)
    both = torch.cat([runs[:ranks], runs[ranks:].flip(0)], 1)
    return both.masked_fill(both >= T, -1)


def places(rows: torch.Tensor, T: int) -> torch.Tensor:
    """int64 [T]: where each token is among the places of all ranks; own: as ``stripes``."""
    order = torch.empty(T, dtype=torch.int64, device="cpu")
    flat = rows.flatten()
    (at,) = torch.where(flat >= 0)
    order[flat[at]] = at
    return order


def of_rank(rank: int, name: str) -> str:
    """What the inputs of a rank's tokens are called, in the programs of all ranks."""
    return f"rank{rank}.{name}"


def of_all(name: str) -> str:
    """What the inputs of all ranks' tokens are called, one rank's behind the other's."""
    return f"ranks.{name}"


PREFIX_LENGTHS, BLOCK_SLOTS = "prefix_lengths", "block_slots"
"""[T]: keys that a token's sequence has had before the step; the places 0, 1 and so on."""
