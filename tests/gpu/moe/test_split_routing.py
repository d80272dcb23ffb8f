"""Each token's choice in two parts, against a sort in plain Python."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.moe.split_routing import split_routing


@pytest.mark.parametrize(("T", "K", "last"), [(5, 8, 3), (3, 6, 0), (2, 3, 9), (0, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_split_routing(T: int, K: int, last: int, dtype: torch.dtype, device: torch.device) -> None:
    g = torch.Generator().manual_seed(T)
    ids = torch.stack([torch.randperm(60, generator=g)[:K] for _ in range(T)] or [torch.empty(K)])
    ids = ids[:T].to(dtype)
    ids[:1, 1] = ids[-1:, 2] = -1
    weights = torch.randint(1, 4, (T, K), generator=g).float()  # many are equal
    first, second = torch.full_like(ids, 7), torch.full_like(ids, 7)
    out = first.to(device), second.to(device)
    split_routing(ids.to(device), weights.to(device), last, out)
    for t in range(T):
        here = [k for k in range(K) if ids[t, k] >= 0]
        smallest = sorted(here, key=lambda k: (-weights[t, k], k))[max(0, len(here) - last) :]
        for k in range(K):
            assert out[0][t, k] == (-1 if k in smallest else ids[t, k])
            assert out[1][t, k] == (ids[t, k] if k in smallest else -1)
    parted, whole = out[0].clone(), torch.arange(T, dtype=dtype) % 2
    split_routing(ids.to(device), weights.to(device), last, out, whole.to(device))
    assert torch.equal(out[0][::2], parted[::2]) and torch.equal(out[0][1::2].cpu(), ids[1::2])
    assert (out[1][1::2] == -1).all()
    dropped = torch.empty_like(out[0])
    split_routing(ids.to(device), weights.to(device), last, (dropped, None))
    assert torch.equal(dropped, parted)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int32, device=device)
    weights = torch.zeros(2, 3, device=device)
    for wrong in (
        lambda: split_routing(weights, weights, 1, (ids, None)),
        lambda: split_routing(ids, weights[:, :2], 1, (ids, None)),
        lambda: split_routing(ids, weights, 1, (ids.long(), None)),
        lambda: split_routing(ids, weights, 1, (ids, None), ids[0]),
    ):
        with pytest.raises(PykernelsError):
            wrong()
