"""The inputs of ranks that share a step's tokens, copied from those of the step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..passes.shard.stripes import BLOCK_SLOTS, PREFIX_LENGTHS, of_all, of_rank, places

_PADDING = {"sequences": -1, "slot_mapping": -1}


def deal_inputs(
    whole: Mapping[str, torch.Tensor],
    ranks: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    T: int,
    R: int,
) -> None:
    """Writes the inputs of all ranks' programs.

    Args:
        whole: by name, those of a step of T tokens and R rows of logits.
        ranks: by name, those of the ranks, as far as their programs have them.
        rows: which tokens are whose, as ``stripes`` says.
    """
    by_token = {name: value[:T] for name, value in whole.items()}
    by_token[PREFIX_LENGTHS] = prefix_lengths(whole, T)
    for name, value in ranks.items():
        kind, _, of = name.partition(".")
        if name == BLOCK_SLOTS:
            value.copy_(torch.arange(len(value), dtype=torch.int64, device="cpu"))
        elif name == of_all("logits_indices"):
            value[:R] = places(rows, T)[whole["logits_indices"][:R]]
        elif name == of_all(of):
            value[: rows.numel()] = _dealt(by_token[of], rows.flatten(), of)
        elif kind.startswith("rank") and kind[4:].isdecimal():
            rank = int(kind[4:])
            assert name == of_rank(rank, of)
            value[: rows.shape[1]] = _dealt(by_token[of], rows[rank], of)


def prefix_lengths(whole: Mapping[str, torch.Tensor], T: int) -> torch.Tensor:
    """int64 [T]: keys that each token's sequence has had before the step: the position of its first
    token there."""
    sequences, positions = whole["sequences"][:T], whole["positions"][:T]
    least = torch.full(
        (len(whole["page_table"]),),
        torch.iinfo(torch.int64).max,
        dtype=torch.int64,
        device="cpu",
    )
    least.scatter_reduce_(0, sequences, positions, "amin")
    return least[sequences]


def _dealt(value: torch.Tensor, rows: torch.Tensor, name: str) -> torch.Tensor:
    return torch.where(rows >= 0, value[rows.clamp_min(0)], _PADDING.get(name, 0))
