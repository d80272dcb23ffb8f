"""A shared expert's factor in one launch, against the linear and its sigmoid in float64."""

from __future__ import annotations

import pytest
import torch

from pykernels.gpu.moe.permute import sort_pairs
from pykernels.gpu.moe.shared_factor import shared_factor
from pykernels.shapes import Routing, SortedPairs


def _order(device: torch.device) -> SortedPairs:
    sizes = ((1,), (2,), (1, 1))
    return SortedPairs(*(torch.full(s, 9, dtype=torch.int32, device=device) for s in sizes))


@pytest.mark.parametrize("H", [96, 2050])
@pytest.mark.parametrize("T", [1, 5])
def test_the_factor_is_the_linears_sigmoid(T: int, H: int, device: torch.device) -> None:
    """Of tokens that lie in wider rows; padding takes no expert, and one token has its order."""
    r = torch.Generator().manual_seed(H)
    rows = torch.randn(T, H + 7, generator=r).to(device, torch.bfloat16)
    x, gate = rows[:, :H], (torch.randn(1, H, generator=r) / H**0.5).to(device, torch.bfloat16)
    ids = torch.full((T, 1), 7, dtype=torch.int32, device=device)
    out = Routing(ids, torch.empty(T, 1, device=device))
    slots = None if T == 1 else torch.tensor([3, 4, -1, 9, -1], dtype=torch.int32, device=device)
    order = _order(device) if T == 1 else None
    shared_factor(x, gate, out, order, slots)
    wanted = torch.sigmoid(x.double() @ gate.double().T)
    torch.testing.assert_close(out.weights.double(), wanted, rtol=1e-6, atol=1e-7)
    assert ids.flatten().tolist() == ([0] if T == 1 else [0, 0, -1, 0, -1])
    if order is not None:
        sort_pairs(ids, 1, sorted_ := _order(device))
        for part in ("pairs", "starts", "positions"):
            assert torch.equal(getattr(order, part), getattr(sorted_, part))


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _compiled() -> None:
    integers = (_meta(*s, dtype=torch.int32) for s in ((1, 1), (1,), (2,), (1, 1)))
    ids, *order = integers
    out = Routing(ids, _meta(1, 1, dtype=torch.float32))
    shared_factor(_meta(1, 2048), _meta(1, 2048), out, SortedPairs(*order))


COMPILES = [("shared_factor", _compiled)]
