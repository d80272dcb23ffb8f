"""A choice of experts parted by where they are, against the definition and against numbers."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.moe.place_routing import place_routing


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_in_slots_and_the_others(dtype: torch.dtype, device: torch.device) -> None:
    ids = torch.tensor([[3, 0, -1], [5, 2, 6]], dtype=dtype, device=device)
    slots = torch.tensor([4, -1, -1, 0, -1, 1], dtype=torch.int32, device=device)
    local, remote = place_routing(ids, slots)
    assert local.tolist() == [[0, 4, -1], [1, -1, -1]]
    assert remote.tolist() == [[-1, -1, -1], [-1, 2, -1]]  # 6 is no expert
    assert local.dtype == remote.dtype == dtype


@pytest.mark.parametrize("T", [0, 1, 70])
def test_the_definition(T: int, device: torch.device) -> None:
    ids = torch.randint(-1, 130, (T, 8), dtype=torch.int32, device=device)
    slots = torch.randperm(128, device=device).to(torch.int32) - 64
    out = torch.empty_like(ids), torch.empty_like(ids)
    found = place_routing(ids, slots, out)
    for mine, part, truth in zip(found, out, ref.place_routing(ids, slots), strict=True):
        assert mine is part and torch.equal(part, truth)


def test_tables_of_another_dtype_are_refused(device: torch.device) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(PykernelsError, match="the slot table is torch.int64"):
        place_routing(ids, torch.zeros(4, dtype=torch.int64, device=device))
