"""Slots sorted by expert, rows gathered and summed: equal to the definition, bit by bit."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.moe import permute as module
from pykernels.gpu.moe.permute import MAX_COMPARED, MAX_EXPERTS, permute, sort_pairs, unpermute
from pykernels.shapes import SortedPairs

from ..rounding import assert_rounded

# T, topk, E, why
SIZES = [
    (0, 8, 256, "no tokens"),
    (1, 1, 1, "the least"),
    (1, 8, 256, "one token"),
    (200, 6, 160, "all compared, the last step ragged"),
    pytest.param(MAX_COMPARED // 8, 8, 64, "as many as are compared", marks=pytest.mark.gpu),
    (MAX_COMPARED // 8 + 1, 8, 64, "some more: in blocks, the last ragged"),
    (90, 8, 255, "E + 1 is a power of two"),
    (3, 8, MAX_EXPERTS, "as many experts as there may be, compared"),
    pytest.param(600, 8, MAX_EXPERTS, "as many, in blocks", marks=pytest.mark.gpu),
    pytest.param(8192, 8, 256, "a prompt", marks=pytest.mark.gpu),
]


def routing(T: int, topk: int, E: int, device: torch.device) -> torch.Tensor:
    """Distinct experts a token, the low ones crowded, some empty."""
    odds = 1 / torch.arange(1, E + 1)
    ids = odds.expand(max(T, 1), -1).multinomial(topk) if T else torch.zeros(0, topk).long()
    return ids.to(device)


def equal(found: SortedPairs, truth: SortedPairs) -> None:
    for field in ("pairs", "starts", "positions"):
        assert torch.equal(getattr(found, field), getattr(truth, field)), field


@pytest.mark.parametrize(("T", "topk", "E", "why"), SIZES)
def test_sort(T: int, topk: int, E: int, why: str, device: torch.device) -> None:
    ids = routing(T, topk, E, device).to(torch.int32 if T % 2 else torch.int64)
    out = sort_pairs(ids, E)
    for field in ("pairs", "starts", "positions"):
        getattr(out, field).fill_(-77)
    equal(sort_pairs(ids, E, out), ref.sort_pairs(ids, E))


def test_blocks_are_counted_in_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than are added up at a time, which are 65536 slots as it is."""
    for name, size in (("MAX_COMPARED", 0), ("BLOCK", 64), ("_OWN", 16)):
        monkeypatch.setattr(module, name, size)
    ids = routing(300, 8, 20, device)
    equal(sort_pairs(ids, 20), ref.sort_pairs(ids, 20))


@pytest.mark.parametrize("T", [200, MAX_COMPARED // 4 + 100])
def test_slots_of_experts_elsewhere_come_last(T: int, device: torch.device) -> None:
    ids = routing(T, 4, 16, device)
    ids[ids > 9] = -1
    ids[ids == 2] = 1 << 40 if ids.dtype == torch.int64 else 99
    found = sort_pairs(ids, 10)
    equal(found, ref.sort_pairs(ids, 10))
    assert 0 < int(found.starts[-1]) < 4 * T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 7), (5, 2048), (9, 2500)])
def test_permute(T: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
    order = sort_pairs(routing(T, 4, 16, device), 16)
    wide = torch.randn(T, H + 3, device=device).to(dtype)
    x = wide[:, :H]  # rows further apart than they are long
    out = torch.full((T * 4, H), torch.nan, device=device).to(dtype)
    permute(x, order, out)
    assert torch.equal(out.view(torch.uint8), ref.permute(x, order).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 7), (9, 2500)])
def test_unpermute(T: int, H: int, add: bool, dtype: torch.dtype, device: torch.device) -> None:
    ids = routing(T, 4, 16, device)
    ids[ids == 3] = -1
    order = sort_pairs(ids, 16)
    y = torch.randn(T * 4, H, device=device).to(dtype)
    y[int(order.starts[-1]) :] = torch.nan  # nobody computed these
    weights = torch.rand(T, 4, device=device)
    weights[ids == -1] = torch.nan  # padding may have any
    wide = torch.randn(T, H + 5, device=device).to(dtype)
    shared = wide[:, :H] if add else None  # a slice of something else
    out = torch.full((T, H), torch.nan, device=device, dtype=dtype)
    unpermute(y, order, weights, shared, out)
    truth = ref.unpermute(y, order, weights, shared, torch.float64)
    assert_rounded(out, truth)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _order(T: int, topk: int, E: int) -> SortedPairs:
    return sort_pairs(_meta(T, topk, dtype=torch.int64), E)


COMPILES = [
    ("sort 8192 tokens", lambda: _order(8192, 8, 256)),
    ("sort 8 tokens", lambda: _order(8, 8, 256)),
    ("permute", lambda: permute(_meta(512, 7168, dtype=torch.bfloat16), _order(512, 8, 256))),
    (
        "unpermute",
        lambda: unpermute(
            _meta(4096, 7168, dtype=torch.bfloat16),
            _order(512, 8, 256),
            _meta(512, 8),
            _meta(512, 7168, dtype=torch.bfloat16),
        ),
    ),
]
