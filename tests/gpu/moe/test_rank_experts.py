"""The experts that most tokens take, and their way to the device."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.moe.rank_experts import rank_experts
from pykernels.gpu.moe.tiles.gather import gather_rows


def test_more_tokens_come_first_and_then_lower_numbers(device: torch.device) -> None:
    ids = torch.tensor([[3, 0, -1], [3, 2, 9], [2, 0, 5]], dtype=torch.int32, device=device)
    slots, order = rank_experts(ids, 6, 4)
    assert order.tolist() == [0, 2, 3, 5]  # twice each, then once; 9 is no expert
    assert slots.tolist() == [0, -1, 1, 2, -1, 3]


@pytest.mark.parametrize(("T", "E", "count"), [(1, 8, 8), (300, 130, 61), (33, 128, 1)])
def test_the_definition(T: int, E: int, count: int, device: torch.device) -> None:
    ids = torch.randint(-1, E + 1, (T, 8), device=device)
    out = tuple(torch.empty(n, dtype=torch.int32, device=device) for n in (E, count))
    found = rank_experts(ids, E, count, (out[0], out[1]))
    for mine, truth in zip(found, ref.rank_experts(ids, E, count), strict=True):
        assert torch.equal(mine, truth)


def test_rows_come_in_the_order_of_a_table(device: torch.device) -> None:
    source = torch.arange(6 * 5001, dtype=torch.int32).view(6, 5001)
    if device.type == "cuda":
        source = source.pin_memory()
    order = torch.tensor([4, 0, 5, 2], dtype=torch.int32, device=device)
    out = torch.empty(3, 5001, dtype=torch.int32, device=device)
    assert torch.equal(gather_rows(source, order, 1, out).cpu(), source[[0, 5, 2]])
