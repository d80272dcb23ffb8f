"""The experts that most tokens take, and their way to the device."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.moe.rank_experts import rank_experts


def test_more_tokens_come_first_and_then_lower_numbers(device: torch.device) -> None:
    ids = torch.tensor([[3, 0, -1], [3, 2, 9], [2, 0, 5]], dtype=torch.int32, device=device)
    slots, order = (torch.empty(n, dtype=torch.int32, device=device) for n in (6, 4))
    rank_experts(ids, slots, order)
    assert order.tolist() == [0, 2, 3, 5]  # twice each, then once; 9 is no expert
    assert slots.tolist() == [0, -1, 1, 2, -1, 3]


@pytest.mark.parametrize(("T", "E", "count"), [(1, 8, 8), (300, 130, 61), (33, 128, 1)])
def test_the_definition(T: int, E: int, count: int, device: torch.device) -> None:
    ids = torch.randint(-1, E + 1, (T, 8), device=device)
    slots, order = (torch.empty(n, dtype=torch.int32, device=device) for n in (E, count))
    rank_experts(ids, slots, order)
    for mine, truth in zip((slots, order), ref.rank_experts(ids, E, count), strict=True):
        assert torch.equal(mine, truth)
