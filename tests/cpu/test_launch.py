"""A call laid out as the last one begins in one compiled function: with its own inputs, always."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pykernels.errors import PykernelsError
from runtime.experts.launch import Part
from runtime.workers.pool import WorkerPool

from .routed import SHAPE, inputs, load


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as made:
        yield made


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call: whether it was launched as the last one."""
    found: list[bool] = []
    repeat = Part.repeat

    def spy(self: Part, *given: torch.Tensor) -> object:
        result = repeat(self, *given)
        found.append(result is not None)
        return result

    monkeypatch.setattr(Part, "repeat", spy)
    return found


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


CHANGES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "x is float32": lambda x, ids, w: (x.float(), ids, w),
    "values of x apart": lambda x, ids, w: (_apart(x), ids, w),
    "rows of x apart": lambda x, ids, w: (torch.cat([x, x], 1)[:, : SHAPE.H], ids, w),
    "ids apart": lambda x, ids, w: (x, _apart(ids), w),
    "weights apart": lambda x, ids, w: (x, ids, _apart(w)),
    "weights are float64": lambda x, ids, w: (x, ids, w.double()),
    "fewer tokens": lambda x, ids, w: (x[:2], ids[:2], w[:2]),
    "no token": lambda x, ids, w: (x[:0], ids[:0], w[:0]),
    "no expert": lambda x, ids, w: (x, ids[:, :0], w[:, :0]),
    "fewer experts a token": lambda x, ids, w: (x, ids[:, :1].clone(), w[:, :1].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_layout_is_arranged_anew_and_so_is_the_next(change, pool, repeated):
    routed, fresh = load(pool), load(pool)
    plain, other = inputs(3), change(*inputs(3, 1))
    wanted, changed = fresh(*plain).clone(), load(pool)(*other)
    contiguous = [each.contiguous() for each in other]
    assert torch.equal(changed, load(pool)(*contiguous))
    repeated.clear()
    for given, result in ((plain, wanted), (plain, wanted), (other, changed), (plain, wanted)):
        y = routed(*given)
        assert y.dtype is given[0].dtype and torch.equal(y, result)
    assert repeated == [False, True, False, False]


def test_like_calls_share_no_memory_and_read_their_own_inputs(pool, repeated):
    routed, fresh = load(pool), load(pool)
    calls = [inputs(2, seed) for seed in range(4)]
    results = [routed(*given) for given in calls]
    assert repeated == [False, True, True, True]
    assert len({y.data_ptr() for y in results}) == 4
    for given, y in zip(calls, results, strict=True):
        fresh(*inputs(1))  # so that the next is arranged anew
        assert torch.equal(fresh(*given), y)


@pytest.mark.parametrize("T", [3, 300])
def test_inputs_may_change_and_be_freed_after_submit(T, pool):
    routed = load(pool)
    wanted = routed(*inputs(T)).clone()
    for _ in range(2):
        given = inputs(T)
        ticket = routed.submit(*given)
        given[0].fill_(float("nan")), given[1].fill_(99), given[2].fill_(float("nan"))
        del given
        assert torch.equal(routed.sync(ticket), wanted)


REFUSED = {
    "ids are int32": (lambda x, ids, w: (x, ids.int(), w), "ids are torch.int32"),
    "more experts than weights": (lambda x, ids, w: (x, torch.cat([ids, ids]), w), "ids"),
    "x is half": (lambda x, ids, w: (x.half(), ids, w), "x is torch.float16"),
    "a wider x": (lambda x, ids, w: (torch.cat([x, x], 1), ids, w), "Give bfloat16 or float32"),
    "tokens that differ": (lambda x, ids, w: (x[:1], ids, w), "for 1 tokens"),
    "no such expert": (lambda x, ids, w: (x, ids + SHAPE.E, w), "in a layer of 6"),
    "x on no CPU": (lambda x, ids, w: (x.to("meta"), ids, w), "x of the CPU experts lies on meta"),
    "x of numpy": (lambda x, ids, w: (x.float().numpy(), ids, w), "x is a numpy.ndarray, no torch"),
    "complex weights": (lambda x, ids, w: (x, ids, w + 0j), "weights are torch.complex64"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_leaves_the_pool_free_and_the_next_call_right(change, message, pool):
    routed = load(pool)
    with pytest.raises(PykernelsError, match=message):
        routed(*change(*inputs(3)))  # the first call of all
    wanted = load(pool)(*inputs(3))
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(routed(*inputs(3)), wanted)
        with pytest.raises(PykernelsError, match=message):
            routed(*change(*inputs(3)))
    assert routed.counters.calls == 4


def test_the_result_is_as_inference_mode_makes_it(pool):
    routed = load(pool)
    for mode in (False, False, True, True, False):
        with torch.inference_mode(mode):
            assert routed(*inputs(1)).is_inference() is mode


def test_experts_may_change_their_pool(repeated):
    routed, wanted = load(None), []
    for _ in range(2):
        with WorkerPool(1) as routed._own_pool:
            wanted += [routed(*inputs(3)), routed(*inputs(3))]
    assert repeated == [False, True, False, True]
    assert all(torch.equal(y, wanted[0]) for y in wanted)
    with pytest.raises(PykernelsError, match="is closed"):
        routed(*inputs(3))


def test_any_topk_and_experts_that_come_twice_add_up(pool):
    routed = load(pool)
    x, ids, _ = inputs(2)
    one = routed(x.float(), ids[:, :1], torch.ones(2, 1))
    many = routed(x.float(), ids[:, :1].expand(2, 2 * SHAPE.E), torch.full((2, 2 * SHAPE.E), 0.25))
    torch.testing.assert_close(many, 0.5 * SHAPE.E * one)


def test_a_result_is_detached(pool):
    x, ids, weights = inputs(2)
    assert not load(pool)(x.float().requires_grad_(), ids, weights.requires_grad_()).requires_grad
