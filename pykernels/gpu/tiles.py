"""A grouped product's blocks of rows as a table, so that a program can walk over many of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..shapes import SortedSlots
from .blocks import block_bound

_OWN = 32


@triton.jit
def _tile_table(
    starts, slots, table, E, bound,
    BLOCK_M: tl.constexpr, E_PADDED: tl.constexpr, HAS_SLOTS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    e = tl.arange(0, E_PADDED)
    lo = tl.load(starts + e, mask=e < E, other=0)
    hi = tl.load(starts + e + 1, mask=e < E, other=0)
    each = (hi - lo + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(each, 0)
    before = after[None, :] <= i[:, None]
    expert = tl.sum(before.to(tl.int32), 1)
    there = expert < E
    expert = tl.minimum(expert, E - 1)
    local = i - tl.sum(tl.where(before, each[None, :], 0), 1)
    slot = expert
    if HAS_SLOTS:
        slot = tl.load(slots + expert)
    row = table + 4 * i
    tl.store(row, slot, mask=there)
    tl.store(row + 1, tl.load(starts + expert) + local * BLOCK_M, mask=there)
    tl.store(row + 2, tl.load(starts + expert + 1), mask=there)
    if tl.program_id(0) == 0:
        tl.store(table + 4 * bound, tl.sum(each, 0))
        tl.store(table + 4 * bound + 1, 0)


def tile_table(
    order: SortedSlots, slots: torch.Tensor | None, block_m: int
) -> tuple[torch.Tensor, int]:
    """(int32 [bound + 1, 4], bound): a line (slot, first row, row behind the expert's last, ..) for
    each block of rows, in order; the last line holds how many there are, and a 0 to count from."""
    S, E = order.slots.shape[0], order.starts.shape[0] - 1
    bound = block_bound(S, E, block_m)
    table = torch.empty(bound + 1, 4, dtype=torch.int32, device=order.slots.device)
    _tile_table[(triton.cdiv(bound, _OWN),)](
        order.starts, slots, table, E, bound, BLOCK_M=block_m,
        E_PADDED=triton.next_power_of_2(E), HAS_SLOTS=slots is not None, OWN=_OWN, num_warps=4,
    )  # fmt: skip
    return table, bound
