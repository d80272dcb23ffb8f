"""Routings of a given skew, and how many layers it takes to be out of cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from runtime.profiling import measure, workload
from runtime.profiling.workload import (
    CACHES,
    MOST_LAYERS,
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
@pytest.mark.parametrize("T", [1, 5, 256])
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
        pytest.param(4, SHAPE, {1}, id="every expert once"),
        pytest.param(1, SHAPE, {0, 1}, id="fewer slots than experts"),
        pytest.param(7, MoEShape(E=12, H=64, I=32, topk=5), {2, 3}, id="no whole number"),
    ],
)
def test_balanced_is_balanced(T: int, shape: MoEShape, counts: set[int]) -> None:
    for ids in routings(shape, T, "balanced"):
        assert set(torch.bincount(ids.flatten(), minlength=shape.E).tolist()) == counts


def test_one_crowds_all_tokens_on_the_same_experts_and_moves_on() -> None:
    found = routings(SHAPE, 256, "one", 4)
    assert [distinct(ids) for ids in found] == [8] * 4
    assert torch.stack(found).unique().numel() == 32


def test_zipf_draws_by_rank() -> None:
    """The first ranks' shares against the weights 1 / (r + 1) where a token draws once."""
    shape = MoEShape(E=32, H=64, I=32, topk=1)
    found = routings(shape, 4096, "zipf", 2)
    weights = 1 / torch.arange(1, 33)
    for ids in found:
        counts = torch.bincount(ids.flatten(), minlength=32).sort(descending=True).values
        shares = counts[:4] / 4096
        assert torch.allclose(shares, weights[:4] / weights.sum(), atol=0.03)
    busiest = [int(ids.flatten().bincount().argmax()) for ids in found]
    assert busiest[0] != busiest[1]  # not always the same expert is the crowded one


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(PykernelsError, match="no routing 'skewed'.*balanced, zipf, one"):
        routings(SHAPE, 1, "skewed")


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


@pytest.mark.parametrize(
    ("kind", "T", "between"),
    [("balanced", 1, 32), ("balanced", 4, 32), ("one", 1, 32), ("one", 256, 32)],
)
def test_calls_in_turn_read_the_whole_layer_before_they_come_back(kind, T, between) -> None:
    assert experts_between(routings(SHAPE, T, kind)) == between


@pytest.mark.parametrize(
    ("l3", "nbytes", "layers"),
    [(32 << 20, 1 << 30, 1), (300 << 20, 1 << 30, 2), (0, 1 << 30, 1), (32 << 20, 1 << 20, 128)],
)
def test_layers_outweigh_the_cache(l3: int, nbytes: int, layers: int) -> None:
    assert layers_out_of_cache(l3, nbytes) == layers
    assert layers * nbytes >= CACHES * l3


def test_more_tokens_than_memory_are_told_before_anything_is_made() -> None:
    check_calls(SHAPE, 1024)
    with pytest.raises(PykernelsError, match=r"of 1000000000000 tokens need \d+\.\d GiB"):
        check_calls(SHAPE, 10**12)


def test_fewer_tokens_are_a_hint_only_where_one_is_not_too_many() -> None:
    with pytest.raises(PykernelsError, match=r"of 2000000000 tokens need .*Take fewer tokens"):
        check_calls(MoEShape(E=32, H=10**5, I=32, topk=8), 2 * 10**9)
    for T, named in ((1, "1 token"), (2, "2 tokens")):
        with pytest.raises(PykernelsError, match=rf"of {named} need .*Take a narrower layer"):
            check_calls(MoEShape(E=32, H=10**11, I=32, topk=8), T)


def test_layers_too_small_to_be_out_of_cache_are_told_before_any_is_made(monkeypatch) -> None:
    monkeypatch.setattr(workload, "_fill", None)
    monkeypatch.setattr(workload, "detect", lambda: SimpleNamespace(l3=260 << 20))
    shape, ids = MoEShape(E=1, H=1, I=1, topk=1), [torch.zeros(1, 1, dtype=torch.int64)]
    told = r"a layer of 20 KiB is too small .* 53248 layers in turn, 8192 .*Take more experts"
    with pytest.raises(PykernelsError, match=told):
        RandomLayers(shape, "fp8", ids)


def test_layers_are_counted_in_whole_huge_pages_but_those_of_less_than_one(monkeypatch) -> None:
    free = SimpleNamespace(memory_available=200 << 20)
    monkeypatch.setattr(workload.Topology, "detect", lambda: free)
    check_layers(MoEShape(E=1, H=1, I=1, topk=1), "fp8", MOST_LAYERS)  # of 20 KiB
    shape = MoEShape(E=1, H=1024, I=700, topk=1)  # a little more than 2 MiB
    check_layers(shape, "fp8", 40)
    with pytest.raises(PykernelsError, match=r"48 layer\(s\) of 1 experts in fp8 need 0.2 GiB"):
        check_layers(shape, "fp8", 48)


def test_a_case_that_cannot_be_is_told_before_anything_is_made(monkeypatch) -> None:
    def made(*_: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(measure, "routings", made)
    monkeypatch.setattr(measure, "RandomLayers", made)
    shape = MoEShape(E=10**9, H=64, I=32, topk=8)
    with pytest.raises(PykernelsError, match=r"1 layer\(s\) of 1000000000 experts in fp8 need \d+"):
        measure.MoECase("fp8", 1, shape, pool=None)
    with pytest.raises(PykernelsError, match="no expert kernel 'fast'"):
        measure.MoECase("fp8", 1, SHAPE, pool=None, kernel="fast")
    with pytest.raises(PykernelsError, match="bf16 weights are not multiplied with int8"):
        measure.MoECase("bf16", 1, SHAPE, pool=None, activations="int8")


def test_layers_turn_before_routings() -> None:
    assert [call_of(i, 2, 3) for i in range(7)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 0),
    ]  # fmt: skip
