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
    RandomLayers,
    call_of,
    check_calls,
    check_layers,
    distinct,
    experts_between,
    layers_out_of_cache,
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


@pytest.mark.parametrize(
    ("T", "shape", "counts"),
    [
        pytest.param(256, SHAPE, {64}, id="the same for all"),
        pytest.param(7, MoEShape(E=12, H=64, I=32, topk=5), {2, 3}, id="no whole number"),
    ],
)
def test_balanced_is_balanced(T: int, shape: MoEShape, counts: set[int]) -> None:
    for ids in routings(shape, T, "balanced"):
        assert set(torch.bincount(ids.flatten(), minlength=shape.E).tolist()) == counts


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


def test_layers_outweigh_the_cache_four_times() -> None:
    assert [layers_out_of_cache(32 << 20, size << 20) for size in (1024, 100, 1)] == [1, 2, 128]
    assert layers_out_of_cache(0, 1 << 30) == 1
    assert [call_of(i, 2, 3) for i in range(7)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 0),
    ]  # fmt: skip
    assert experts_between(routings(SHAPE, 1, "one")) == 32  # it moves on
    assert [distinct(ids) for ids in routings(SHAPE, 256, "one", 4)] == [8] * 4


def _case(monkeypatch: pytest.MonkeyPatch, **given: object) -> None:
    """A case of which nothing may be made."""
    monkeypatch.setattr(measure, "routings", None)
    monkeypatch.setattr(measure, "RandomLayers", None)
    measure.MoECase(**{"fmt": "fp8", "T": 1, "shape": SHAPE, "pool": None, **given})


WIDE = MoEShape(E=32, H=10**11, I=32, topk=8)
REFUSED = {
    "tokens": ({"T": 10**12}, r"of 1000000000000 tokens need \d+\.\d GiB.*Take fewer tokens"),
    "width": ({"shape": WIDE}, "of 1 token need .*Take a narrower layer"),
    "experts": (
        {"shape": MoEShape(E=10**9, H=64, I=32, topk=8)},
        r"1 layer\(s\) of 1000000000 experts in fp8 need \d+",
    ),
    "kernel": ({"kernel": "fast"}, "no expert kernel 'fast'"),
    "activations": ({"fmt": "bf16", "activations": "int8"}, "bf16 weights are not multiplied"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_case_that_cannot_be_is_refused_before_it_begins(monkeypatch, given, message) -> None:
    check_calls(SHAPE, 1024)
    with pytest.raises(PykernelsError, match=message):
        _case(monkeypatch, **given)


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(PykernelsError, match="no routing 'skewed'.*balanced, zipf, one"):
        routings(SHAPE, 1, "skewed")


def test_too_many_layers_are_refused_before_any_is_made(monkeypatch) -> None:
    free = SimpleNamespace(memory_available=200 << 20)
    monkeypatch.setattr(workload.Topology, "detect", lambda: free)
    shape = MoEShape(E=1, H=1024, I=700, topk=1)  # a little more than 2 MiB: two huge pages
    check_layers(shape, "fp8", 40)
    with pytest.raises(PykernelsError, match=r"48 layer\(s\) of 1 experts in fp8 need 0.2 GiB"):
        check_layers(shape, "fp8", 48)
    monkeypatch.setattr(workload, "_fill", None)
    monkeypatch.setattr(workload, "detect", lambda: SimpleNamespace(l3=260 << 20))
    tiny, ids = MoEShape(E=1, H=1, I=1, topk=1), [torch.zeros(1, 1, dtype=torch.int64)]
    message = r"a layer of 20 KiB is too small .* 53248 layers in turn, 8192 .*Take more experts"
    with pytest.raises(PykernelsError, match=message):
        RandomLayers(tiny, "fp8", ids)
