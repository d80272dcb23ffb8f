"""The table of a grouped product's tiles against a loop over its experts."""

from __future__ import annotations

import pytest
import torch

from pykernels.gpu.gemm.tiles import tile_table
from pykernels.gpu.moe.permute import sort_slots

COUNTS = [[5, 0, 16, 33, 0], [0, 0, 1], [64], [40, 8, 8, 8, 0, 0, 0, 3]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("slots", [False, True], ids=["in order", "by a slot table"])
def test_every_block_of_every_expert_is_one_line(
    counts: list[int], slots: bool, device: torch.device
) -> None:
    E = len(counts)
    ids = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    ids = torch.cat((ids, torch.tensor([E, -1])))  # of no expert: in no tile
    order = sort_slots(ids[torch.randperm(len(ids))][:, None].to(device), E)
    where = torch.randperm(E, dtype=torch.int32) - 1
    table, bound = tile_table(order, where.to(device) if slots else None, 16)
    expected, begin = [], 0
    for e, count in enumerate(counts):
        slot = int(where[e]) if slots else e
        lines = range(begin, begin + count, 16)
        expected += [[slot, first, begin + count] for first in lines]
        begin += count
    assert int(table[bound, 0]) == len(expected) <= bound
    assert table[: len(expected), :3].tolist() == expected
