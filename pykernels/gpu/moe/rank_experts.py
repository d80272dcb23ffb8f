"""The experts that most tokens of a step take: twin of ``ref.rank_experts``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.launch import check_device
from ..common.strides import check_out
from ..limits import RANKED_EXPERTS as MAX_EXPERTS

_BLOCK = 1024
"""Choices that are counted at once."""
_OTHERS = 32
"""Experts that each one is compared with at once."""


@triton.jit(do_not_specialize=["n", "count"])
def _rank(
    ids, slots, order, n, E, count, BLOCK: tl.constexpr, EP: tl.constexpr, OTHERS: tl.constexpr
):
    e = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        expert = tl.load(ids + i, mask=i < n, other=-1).to(tl.int32)
        known = (expert >= 0) & (expert < E)
        total += tl.histogram(tl.where(known, expert, E), EP)
    # The table holds the counts meanwhile: every thread compares its own with all.
    tl.store(slots + e, total, mask=e < E)
    tl.debug_barrier()
    rank = tl.zeros([EP], tl.int32)
    for first in range(0, E, OTHERS):
        j = first + tl.arange(0, OTHERS)
        other = tl.load(slots + j, mask=j < E, other=-1)
        more = other[None, :] > total[:, None]
        same = (other[None, :] == total[:, None]) & (j[None, :] < e[:, None])
        rank += tl.sum((more | same).to(tl.int32), 1)
    tl.debug_barrier()
    chosen = (e < E) & (rank < count)
    tl.store(slots + e, tl.where(chosen, rank, -1), mask=e < E)
    tl.store(order + rank, e, mask=chosen)


def rank_experts(
    ids: torch.Tensor,
    experts: int,
    count: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks experts by how many tokens take them. One launch.

    Args:
        ids: contiguous int32 or int64 [T, topk]; outside 0..experts-1: of no expert.
        experts: of the layer; ``count``: how many of them are ranked.
        out: contiguous int32 [experts] and [count]; None: new ones.

    Returns:
        The place of each expert among those that most tokens take, or -1; and those in order, of
        those with as many tokens the first.

    Raises:
        PykernelsError: other dtypes or shapes, more experts than ``MAX_EXPERTS``; no Triton here.
    """
    check_device(ids)
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise PykernelsError(
            f"the ids are {ids.dtype} {tuple(ids.shape)}", "Give contiguous int32 [T, topk]"
        )
    if not 0 < count <= experts <= MAX_EXPERTS:
        raise PykernelsError(
            f"{count} of {experts} experts", f"Give 1 to all, of at most {MAX_EXPERTS} experts"
        )
    slots, order = (
        check_out(part, ids, size, dtype=torch.int32)
        for part, size in zip(out or (None, None), (experts, count), strict=True)
    )
    EP = triton.next_power_of_2(experts + 1)
    _rank[(1,)](
        ids,
        slots,
        order,
        ids.numel(),
        experts,
        count,
        BLOCK=_BLOCK,
        EP=EP,
        OTHERS=_OTHERS,
        num_warps=8,
    )
    return slots, order
