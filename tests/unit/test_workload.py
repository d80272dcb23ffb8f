"""Routings of a given skew, and how many layers it takes to be out of cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from runtime.profiling import measure, workload
from runtime.profiling.workload import (
    ROUTINGS,
    check_calls,
    check_layers,
    experts_between,
    routings,
)

SHAPE = MoEShape(E=32, H=64, I=32, topk=8)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("T", [1, 256])
def test_routings_name_distinct_experts_and_repeat(kind: str, T: int) -> None:
    found, again = routings(SHAPE, T, kind, 6), routings(SHAPE, T, kind, 6)
    assert len(found) == 6
    for ids, same in zip(found, again, strict=True):
        assert (ids.shape, ids.dtype, ids.is_contiguous()) == ((T, 8), torch.int64, True)
        assert torch.equal(ids, same)
        assert all(row.unique().numel() == 8 for row in ids)
        assert 0 <= int(ids.min()) and int(ids.max()) < 32


def test_balanced_is_balanced() -> None:
    with pytest.raises(PykernelsError, match="no routing 'skewed'.*balanced, zipf, one"):
        routings(SHAPE, 1, "skewed")
    for ids in routings(MoEShape(E=12, H=64, I=32, topk=5), 7, "balanced"):
        assert set(torch.bincount(ids.flatten(), minlength=12).tolist()) == {2, 3}


def test_zipf_draws_by_rank() -> None:
    """The first ranks' shares against the weights 1 / (r + 1) where a token draws once."""
    found = routings(MoEShape(E=32, H=64, I=32, topk=1), 4096, "zipf", 2)
    weights = 1 / torch.arange(1, 33)
    for ids in found:
        counts = torch.bincount(ids.flatten(), minlength=32).sort(descending=True).values
        assert torch.allclose(counts[:4] / 4096, weights[:4] / weights.sum(), atol=0.03)
    busiest = [int(ids.flatten().bincount().argmax()) for ids in found]
    assert busiest[0] != busiest[1]


@pytest.mark.parametrize(
    ("found", "between"),
    [
        pytest.param([[0, 1]], 2, id="one routing: its own experts"),
        pytest.param([[0, 1], [2, 3], [4, 5]], 6, id="none comes back before all were read"),
        pytest.param([[0, 1], [2, 0], [4, 5]], 2, id="one comes back at once"),
        pytest.param([[0, 1], [2, 3], [4, 5, 1]], 3, id="around the end"),
    ],
)
def test_experts_between_two_uses(found: list[list[int]], between: int) -> None:
    assert experts_between([torch.tensor([ids]) for ids in found]) == between


def _case(monkeypatch: pytest.MonkeyPatch, **given: object) -> None:
    """A case of which nothing may be made."""
    monkeypatch.setattr(measure, "routings", None)
    monkeypatch.setattr(measure, "RandomLayers", None)
    measure.MoECase(**{"fmt": "fp8", "T": 1, "shape": SHAPE, "pool": None, **given})


REFUSED = {
    "tokens": ({"T": 10**12}, r"of 1000000000000 tokens need \d+\.\d GiB.*Take fewer tokens"),
    "experts": (
        {"shape": MoEShape(E=10**9, H=64, I=32, topk=8)},
        r"1 layer\(s\) of 1000000000 experts in fp8 need \d+",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_case_that_cannot_be_is_refused_before_it_begins(monkeypatch, given, message) -> None:
    check_calls(SHAPE, 1024)
    with pytest.raises(PykernelsError, match=message):
        _case(monkeypatch, **given)


def test_too_many_layers_are_refused_before_any_is_made(monkeypatch) -> None:
    free = SimpleNamespace(memory_available=200 << 20)
    monkeypatch.setattr(workload.Topology, "detect", lambda: free)
    shape = MoEShape(E=1, H=1024, I=700, topk=1)  # a little more than 2 MiB: two huge pages
    check_layers(shape, "fp8", 40)
    with pytest.raises(PykernelsError, match=r"48 layer\(s\) of 1 experts in fp8 need 0.2 GiB"):
        check_layers(shape, "fp8", 48)
