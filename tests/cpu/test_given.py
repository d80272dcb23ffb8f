"""Tensors that are not plain memory: taken for what they say, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pykernels.errors import PykernelsError
from runtime.workers.pool import WorkerPool

from .routed import SHAPE, inputs, load


def _fake(given: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(given)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, r"is torch.sparse_coo. Give it dense"),
    "rows of values": (torch.Tensor.to_sparse_csr, r"is torch.sparse_csr. Give it dense"),
    "nested": (lambda t: torch.nested.nested_tensor([t[0], t[1]]), "is nested. Give it dense"),
    "fake": (_fake, "is a FakeTensor without memory. Call them outside of tracing"),
    "nowhere": (lambda t: torch.empty_like(t, device="meta"), r"lies on meta. Give it on the CPU"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is a prototype of its
@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "ids", "weights"])
def test_what_has_no_memory_of_its_values_is_refused(make, told: str, which: int) -> None:
    with WorkerPool(1) as pool:
        routed, given = load(pool), list(inputs(3))
        wrong = [*given[:which], make(given[which]), *given[which + 1 :]]
        for _ in range(2):  # before any call, and where a like one would begin at once
            with pytest.raises(PykernelsError, match=told):
                routed(*wrong)
            wanted = routed(*given).clone()
            assert torch.equal(routed(*given), wanted)


@pytest.mark.filterwarnings("ignore")
def test_where_results_would_have_no_memory_the_call_is_refused() -> None:
    with WorkerPool(1) as pool:
        routed, given = load(pool), inputs(3)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with pytest.raises(PykernelsError, match="y of the CPU experts is a FakeTensor"):
                routed(*given)
        wanted = routed(*given).clone()
        with FakeTensorMode(allow_non_fake_inputs=True):
            routed(*given)  # into room that was there; what it makes for the next call is none
        assert torch.equal(routed(*given), wanted)


def _negated(given: torch.Tensor) -> torch.Tensor:
    """The same values, as the imaginary halves of conjugates."""
    view = torch.complex(torch.zeros_like(given), -given).conj().imag
    assert view.is_neg() and torch.equal(view, given)
    return view


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (3, 2)], ids=str)
def test_negated_views_are_taken_as_they_read(shape: tuple[int, int]) -> None:
    T, topk = shape
    with WorkerPool(1) as pool:
        routed, (x, ids, weights) = load(pool), inputs(T)
        x, ids, weights = x.float(), ids[:, :topk].contiguous(), weights[:, :topk].contiguous()
        for _ in range(3):
            for given in ((_negated(x), ids, weights), (x, ids, _negated(weights))):
                other = load(pool)
                assert torch.equal(routed(*given), other(x, ids, weights))
                assert torch.equal(routed(x, ids, weights), other(x, ids, weights))
        flat = torch._neg_view(-x), torch._neg_view(-ids), torch._neg_view(-weights)
        assert torch.equal(load(pool)(*flat), routed(x, ids, weights))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float32])
def test_narrow_ids_are_refused(dtype: torch.dtype) -> None:
    with WorkerPool(1) as pool:
        routed, (x, ids, weights) = load(pool), inputs(3)
        for _ in range(2):
            with pytest.raises(PykernelsError, match=f"ids are {dtype} .*Give int64 ids"):
                routed(x, ids.to(dtype), weights)
            assert routed(x, ids, weights).shape == (3, SHAPE.H)
