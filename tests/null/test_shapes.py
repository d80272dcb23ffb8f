"""Shapes are validated where they are made."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape, Routing


@pytest.mark.parametrize("field", ["E", "H", "I", "topk"])
def test_a_dimension_below_one_is_refused(field):
    sizes = {"E": 4, "H": 64, "I": 32, "topk": 2, field: 0}
    with pytest.raises(PykernelsError, match=f"{field}=0"):
        MoEShape(**sizes)


def test_topk_above_E_is_refused():
    with pytest.raises(PykernelsError, match="top-5 of 4"):
        MoEShape(E=4, H=64, I=32, topk=5)


def test_routing_must_match_its_weights():
    with pytest.raises(PykernelsError, match="do not match"):
        Routing(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1))


def test_distinct_experts_are_counted_once():
    routing = Routing(torch.tensor([[0, 3], [3, 1]]), torch.ones(2, 2))
    assert (routing.T, routing.topk, routing.distinct_experts()) == (2, 2, 3)


def test_an_error_is_one_line():
    error = PykernelsError("two\n lines.", "mend\nit.")
    assert str(error) == "two lines. mend it."
