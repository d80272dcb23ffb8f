"""A call like the last one begins in one compiled function: never on what the last one left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.shapes import MoEShape
from pykernels.testing import random_experts, skewed_routing
from runtime.experts.launch import Part
from runtime.experts.routed import RoutedExperts
from runtime.workers.pool import Call, TaskError, WorkerPool

SHAPE = MoEShape(E=6, H=128, I=64, topk=2)
EXPERTS = random_experts(SHAPE, get_format("bf16"))


def _load(pool: WorkerPool) -> RoutedExperts:
    routed = RoutedExperts(SHAPE, "bf16", pool, "generic")
    for e in range(SHAPE.E):
        routed.load_expert(e, *EXPERTS.unpack(e))
    return routed


@task("failing")
def _failing(job, index, worker):
    return 77


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as made:
        yield made


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call: whether it was like the last one."""
    seen: list[bool] = []
    repeat = Part.repeat

    def spy(self: Part, *inputs: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        result = repeat(self, *inputs)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(Part, "repeat", spy)
    return seen


def _inputs(T: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    routing = skewed_routing(T, SHAPE, seed)
    x = torch.randn(T, SHAPE.H, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16(), routing.ids, routing.weights


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
    "fewer experts a token": lambda x, ids, w: (
        x, ids[:, :1].contiguous(), w[:, :1].contiguous()
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_laid_out_otherwise_is_arranged_anew_and_so_is_the_next(change, pool, begun):
    routed, fresh = _load(pool), _load(pool)
    plain, other = _inputs(3), change(*_inputs(3, 1))
    wanted, changed = fresh(*plain).clone(), _load(pool)(*other)
    begun.clear()
    for inputs, result in ((plain, wanted), (plain, wanted), (other, changed), (plain, wanted)):
        y = routed(*inputs)
        assert y.dtype is inputs[0].dtype and torch.equal(y, result)
    assert begun == [False, True, False, False]


def test_like_calls_share_no_memory_and_read_their_own_inputs(pool, begun):
    routed, fresh = _load(pool), _load(pool)
    calls = [_inputs(2, seed) for seed in range(4)]
    results = [routed(*inputs) for inputs in calls]
    assert begun == [False, True, True, True]
    assert len({y.data_ptr() for y in results}) == 4
    for inputs, y in zip(calls, results, strict=True):
        fresh(*_inputs(1))  # always arranged anew
        assert torch.equal(fresh(*inputs), y)


def test_inputs_may_change_and_go_behind_submit(pool, begun):
    routed = _load(pool)
    wanted = routed(*_inputs(3)).clone()
    inputs = _inputs(3)
    ticket = routed.submit(*inputs)  # on one thread nothing is computed before sync
    assert begun == [False, True]
    inputs[0].fill_(float("nan")), inputs[1].fill_(99), inputs[2].fill_(float("nan"))
    del inputs
    assert torch.equal(routed.sync(ticket), wanted)


REFUSED = {
    "ids are int32": (lambda x, ids, w: (x, ids.int(), w), "ids are torch.int32"),
    "ids are int32 and, as int64, experts that there are": (
        lambda x, ids, w: (x, torch.zeros(99, dtype=torch.int32)[: ids.numel()].view_as(ids), w),
        "ids are torch.int32",
    ),
    "more experts than weights": (lambda x, ids, w: (x, torch.cat([ids, ids]), w), "ids"),
    "x is half": (lambda x, ids, w: (x.half(), ids, w), "x is torch.float16"),
    "a wider x": (lambda x, ids, w: (torch.cat([x, x], 1), ids, w), "Give bfloat16 or float32"),
    "tokens that differ": (lambda x, ids, w: (x[:1], ids, w), "for 1 tokens"),
    "no such expert": (lambda x, ids, w: (x, ids + SHAPE.E, w), "in a layer of 6"),
    "an expert below 0": (lambda x, ids, w: (x, ids - SHAPE.E, w), "in a layer of 6"),
    "x on no CPU": (lambda x, ids, w: (x.to("meta"), ids, w), "x of the CPU experts lies on meta"),
    "ids on no CPU": (lambda x, ids, w: (x, ids.to("meta"), w), "ids of the CPU .* lies on meta"),
    "x of numpy": (lambda x, ids, w: (x.float().numpy(), ids, w), "x is a numpy.ndarray, no torch"),
    "no x": (lambda x, ids, w: (None, ids, w), "x is None, no torch tensor"),
    "ids in a list": (lambda x, ids, w: (x, ids.tolist(), w), "ids is a builtins.list, no torch"),
    "weights of numpy": (lambda x, ids, w: (x, ids, w.numpy()), "weights is a numpy.ndarray, no"),
    "complex weights": (lambda x, ids, w: (x, ids, w + 0j), "weights are torch.complex64"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_leaves_the_pool_free_and_the_next_call_right(change, message, pool):
    routed = _load(pool)
    wanted = routed(*_inputs(3)).clone()
    with pytest.raises(PykernelsError, match=message):
        _load(pool)(*change(*_inputs(3)))  # the first call of all
    for _ in range(2):
        with pytest.raises(PykernelsError, match=message):
            routed(*change(*_inputs(3)))
        for _ in range(2):
            assert torch.equal(routed(*_inputs(3)), wanted)
    assert routed.counters.calls == 5


def test_a_like_call_on_a_pool_that_is_taken_is_refused_and_loses_nothing(pool, begun):
    routed, other = _load(pool), _load(pool)
    wanted = routed(*_inputs(3)).clone()
    ticket = other.submit(*_inputs(2))
    with pytest.raises(PykernelsError, match="still running on this pool"):
        routed(*_inputs(3))
    other.sync(ticket)
    claimed, leave = threading.Event(), threading.Event()

    def prepare() -> None:
        pool.claim()
        claimed.set()
        leave.wait()
        pool.release()

    thread = threading.Thread(target=prepare)
    thread.start()
    claimed.wait()
    with pytest.raises(PykernelsError, match="another thread prepares a call"):
        routed(*_inputs(3))
    leave.set()
    thread.join()
    assert torch.equal(routed(*_inputs(3)), wanted)
    assert begun == [False, False, False, False, True]


def test_a_workspace_that_another_layer_has_replaced_is_let_go(pool, begun):
    routed, larger = _load(pool), _load(pool)
    wanted = routed(*_inputs(2)).clone()
    T = 3 * max(len(pool.workspace.buffers["acc"]), 2)
    larger(*_inputs(T))
    assert torch.equal(routed(*_inputs(2)), wanted)
    assert begun[-1] is False
    assert routed._bind()[0]._moe._buffers is pool.workspace.buffers


def test_the_result_is_as_inference_mode_makes_it(pool):
    routed = _load(pool)
    for mode in (False, False, True, True, False):
        with torch.inference_mode(mode):
            assert routed(*_inputs(1)).is_inference() is mode


def test_a_failing_call_is_not_counted_and_the_next_one_is(pool):
    routed = _load(pool)
    wanted = routed(*_inputs(3)).clone()
    job = routed._bind()[0]._moe.job
    good, job["run_gate_up"] = int(job["run_gate_up"][0]), _failing.address
    with pytest.raises(TaskError, match="gate-up task .* of expert"):
        routed(*_inputs(3))
    job["run_gate_up"] = good
    assert routed.counters.calls == 1
    assert torch.equal(routed(*_inputs(3)), wanted)
    assert (routed.counters.calls, routed.counters.tokens) == (2, 6)


def test_two_pools_are_told_apart(begun):
    routed, wanted = RoutedExperts(SHAPE, "bf16", None, "generic"), []
    for e in range(SHAPE.E):
        routed.load_expert(e, *EXPERTS.unpack(e))
    for _ in range(2):
        with WorkerPool(1) as routed._own_pool:
            wanted += [routed(*_inputs(3)), routed(*_inputs(3))]
    assert begun == [False, True, False, True]
    assert all(torch.equal(y, wanted[0]) for y in wanted)
    with pytest.raises(PykernelsError, match="is closed"):
        routed(*_inputs(3))


def test_barriers_of_a_larger_call_serve_a_smaller_one(pool):
    routed = _load(pool)
    wanted = routed(*_inputs(3)).clone()
    pool.start(Call(0, 0, 0, 0, 0, 0))
    pool.wait()
    pool.claim()
    pool.reserve_barriers(4096)
    pool.release()
    assert torch.equal(routed(*_inputs(3)), wanted)


def test_any_topk_and_experts_that_come_twice_add_up(pool):
    routed = _load(pool)
    x, ids, _ = _inputs(2)
    one = routed(x.float(), ids[:, :1], torch.ones(2, 1))
    many = routed(x.float(), ids[:, :1].expand(2, 2 * SHAPE.E), torch.full((2, 2 * SHAPE.E), 0.25))
    torch.testing.assert_close(many, 0.5 * SHAPE.E * one)


def test_a_result_is_detached(pool):
    x, ids, weights = _inputs(2)
    assert not _load(pool)(x.float().requires_grad_(), ids, weights.requires_grad_()).requires_grad


def test_a_like_call_in_a_forked_child_is_refused(pool):
    routed = _load(pool)
    wanted = routed(*_inputs(3)).clone()
    child = os.fork()
    if child == 0:
        try:
            routed(*_inputs(3))
        except PykernelsError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(routed(*_inputs(3)), wanted)
