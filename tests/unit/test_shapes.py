"""Shapes are validated where they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape, Ragged, RouterSpec, Routing, SortedPairs

SIZES = {"E": 4, "H": 64, "I": 32, "topk": 2}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(({field: 0}, f"{field}=0. {field} must be a whole number from 1") for field in SIZES),
        ({"E": 1.5}, "E=1.5. E must be a whole number"),
        ({"E": None}, "E=None. E must be a whole number"),
        ({"topk": 5}, "top-5 of 4"),
    ],
)
def test_impossible_moe_shapes_are_refused(wrong: dict, told: str):
    with pytest.raises(PykernelsError, match=told):
        MoEShape(**SIZES | wrong)


def test_routing_matches_its_weights():
    routing = Routing(torch.tensor([[0, 3], [3, 1]]), torch.ones(2, 2))
    assert (routing.T, routing.topk, routing.distinct_experts()) == (2, 2, 3)
    with pytest.raises(PykernelsError, match="do not match"):
        Routing(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1))


N = torch.zeros(6, dtype=torch.int32)
ORDER = {"pairs": N, "starts": N[:5], "positions": N.view(3, 2)}


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("pairs", N.long()),
        ("pairs", N[:5]),
        ("starts", N[::2]),
        ("starts", N[:0]),
        ("positions", N),
        ("positions", N.view(2, 3).T),
    ],
)
def test_an_order_is_dense_integers(part: str, wrong: torch.Tensor):
    assert SortedPairs(**ORDER).topk == 2
    with pytest.raises(PykernelsError, match="order"):
        SortedPairs(**{**ORDER, part: wrong})


@pytest.mark.parametrize("part", ["q_starts", "q_lengths", "k_lengths", "k_starts"])
@pytest.mark.parametrize("wrong", [N[::2], N[:2], N[:3].long()])
def test_starts_and_lengths_are_dense_integers(part: str, wrong: torch.Tensor):
    parts = dict.fromkeys(("q_starts", "q_lengths", "k_lengths", "k_starts"), N[:3])
    assert Ragged(**parts, max_queries=1).B == 3
    with pytest.raises(PykernelsError, match="do not match"):
        Ragged(**{**parts, part: wrong}, max_queries=1)


def test_an_error_is_one_line():
    error = PykernelsError("two\n lines.", "hint\nit.")
    assert str(error) == "two lines. hint it."


def test_a_router_takes_numpys_numbers():
    spec = RouterSpec(np.int64(8), groups=np.int32(4), group_topk=np.int8(2), scale=np.float32(2.5))
    numbers = spec.topk, spec.groups, spec.group_topk, spec.scale
    assert numbers == (8, 4, 2, 2.5) and [type(x) for x in numbers] == [int, int, int, float]
    wrong: dict[str, object]
    for wrong in ({"topk": 8.0}, {"topk": True}, {"groups": None}, {"scale": "2"}):
        with pytest.raises(PykernelsError, match=f"router {next(iter(wrong))} is"):
            RouterSpec(**{"topk": 2, **wrong})  # type: ignore[arg-type]


def test_a_router_asks_for_experts_that_its_groups_have():
    with pytest.raises(PykernelsError, match="group"):
        RouterSpec(2, groups=4, group_topk=5)
    with pytest.raises(PykernelsError, match="16 experts"):
        RouterSpec(5, groups=4, group_topk=1).check(16)
    RouterSpec(4, groups=4, group_topk=1).check(16)
    with pytest.raises(PykernelsError, match="two best"):
        RouterSpec(1, groups=4, group_score="top2").check(4)
    RouterSpec(1, group_score="top2").check(1)  # of no groups nothing is asked
