"""Pairs of a token and one of its experts, which go to the ranks that have the experts, and back.

Of ``starts``, members + 1 numbers, the i-th member has the experts ``starts[i] .. starts[i + 1] -
1``. Its pairs have places 0, 1 and so on among each other, in the order of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch


class Taken(NamedTuple):
    """The pairs of one member.

    Attributes:
        rows: [room, H], of their tokens.
        ids: int [room, 1], their experts among the member's; -1 behind the last pair.
        factors: float32 [room, 1].
    """

    rows: torch.Tensor
    ids: torch.Tensor
    factors: torch.Tensor


def place_pairs(
    ids: torch.Tensor,
    starts: Sequence[int],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each pair among its member's, -1 of no expert: [T, topk]; and how many each
    member has: [members].

    Args:
        ids: int [T, topk], experts; -1: none.
        out: both, of any ints.
    """
    places, counts = out or (torch.empty_like(ids), ids.new_empty(len(starts) - 1))
    flat, found = ids.flatten(), torch.full_like(ids.flatten(), -1)
    for member, (first, last) in enumerate(pairwise(starts)):
        own = (flat >= first) & (flat < last)
        place = own.cumsum(0)
        found = torch.where(own, place - 1, found)
        counts[member : member + 1] = own.sum()[None]
    places.copy_(found.view_as(ids))
    return places, counts


def take_pairs(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor,
    experts: tuple[int, int],
    room: int,
    out: Taken | None = None,
) -> Taken:
    """The pairs of the member that has these experts, in their places.

    Args:
        x: [T, H].
        ids: int [T, topk]; ``weights``: float32, ``places``: int, likewise.
        experts: first and end.
        room: rows of the result, at least as many as there are pairs.
    """
    taken = out or Taken(
        x.new_empty(room, x.shape[1]), ids.new_empty(room, 1), weights.new_empty(room, 1)
    )
    token, choice = torch.where((ids >= experts[0]) & (ids < experts[1]))
    at = places[token, choice].long()
    taken.rows[at] = x[token].to(taken.rows.dtype)
    taken.ids.fill_(-1)
    taken.ids[at, 0] = (ids[token, choice] - experts[0]).to(taken.ids.dtype)
    taken.factors[at, 0] = weights[token, choice]
    return taken


def sum_pairs(
    rows: Sequence[torch.Tensor],
    ids: torch.Tensor,
    places: torch.Tensor,
    starts: Sequence[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the members' experts have made of each token, summed in the order of its experts.

    Args:
        rows: by member, [room, H], in the places of its pairs.
        ids, places: int [T, topk].
        out: [T, H].
    """
    if out is None:
        out = rows[0].new_empty(len(ids), rows[0].shape[1])
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for choice in range(ids.shape[1]):
        for member, (first, last) in enumerate(pairwise(starts)):
            own = (ids[:, choice] >= first) & (ids[:, choice] < last)
            total[own] += rows[member][places[own, choice].long()].float()
    out.copy_(total)
    return out
