"""A signal's handler that calls experts while a call of its thread is prepared: refused, or right.

It is put where it comes: a function of the preparation calls it, before or behind its own work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

from pykernels.cpu.moe.call import MoECall, Workspace
from pykernels.errors import PykernelsError
from runtime.experts import routed as experts_routed
from runtime.machine.topology import Topology
from runtime.workers import pool as pools
from runtime.workers.pool import Call, WorkerPool, make_pool

from .routed import TWO_CORES, elsewhere, inputs, load

ARRANGING = [
    (MoECall, "arrange"),
    (MoECall, "_plan"),
    (MoECall, "_reserve"),
    (MoECall, "_bind"),
    (Workspace, "reserve"),
    (WorkerPool, "reserve_barriers"),
]


def _handle(
    patch: pytest.MonkeyPatch, owner: object, name: str, before: bool, handler: Callable[[], object]
) -> list[object]:
    """What the handler gave or raised, once, before or behind the function."""
    real, seen = getattr(owner, name), list[object]()

    def signalled() -> None:
        patch.setattr(owner, name, real)
        try:
            seen.append(handler())
        except PykernelsError as error:
            seen.append(error)

    def function(*given: object) -> object:
        if before:
            signalled()
        result = real(*given)
        if not before:
            signalled()
        return result

    patch.setattr(owner, name, function)
    return seen


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(("owner", "name"), ARRANGING, ids=[name for _, name in ARRANGING])
@pytest.mark.parametrize("whose", ["the same experts", "another layer"])
def test_a_call_in_the_middle_of_another_is_refused(monkeypatch, whose, owner, name, before):
    with WorkerPool(1) as pool:
        routed = load(pool)
        layer = routed if whose == "the same experts" else load(pool)
        wanted = {T: layer(*inputs(T)).clone() for T in (2, 5, 80)}
        handlers = (
            lambda: layer(*inputs(5)),
            lambda: layer.submit(*inputs(5)),
            lambda: pool.run(Call(0, 0, 0, 0, 0, 0)),
            pool.settle,
        )
        for handler in handlers:
            for T in (2, 80):
                routed(*inputs(5)), layer(*inputs(5)), layer(*inputs(5))
                with monkeypatch.context() as patch:
                    seen = _handle(patch, owner, name, before, handler)
                    assert torch.equal(routed(*inputs(T)), wanted[T])
                assert seen and (seen == [None] or "this thread, interrupted" in str(seen[0]))
                for n in (5, 2, 80):
                    assert torch.equal(layer(*inputs(n)), wanted[n])
                assert torch.equal(elsewhere(lambda: routed(*inputs(2)))[0], wanted[2])


@TWO_CORES
@pytest.mark.parametrize("which", [0, 1])
def test_a_call_in_the_middle_of_one_on_several_nodes_leaves_it_right_or_refused(
    monkeypatch, which
):
    with make_pool(2, True, "2", Topology.fake(2)) as pools:
        routed = load(pools)
        wanted = {T: routed(*inputs(T)).clone() for T in (2, 5)}
        part = routed._bind()[which]
        with monkeypatch.context() as patch:
            seen = _handle(patch, part._moe, "arrange", False, lambda: routed(*inputs(5)))
            try:
                assert torch.equal(routed(*inputs(2)), wanted[2])
            except PykernelsError as error:
                assert "prepares a call" in str(error)
        assert "this thread, interrupted" in str(seen[0])
        for n in (5, 2, 5):
            assert torch.equal(routed(*inputs(n)), wanted[n])


def _in_time(function: Callable[[], object]) -> object:
    """What it gives; on another thread, since one that waits for itself cannot be waited for."""
    out: list[object] = []
    thread = threading.Thread(target=lambda: out.append(function()), daemon=True)
    thread.start()
    thread.join(20)
    assert out, "it waits for itself"
    return out[0]


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_experts_that_are_bound_in_the_middle_of_their_binding_are_bound_once(monkeypatch, before):
    with WorkerPool(1) as pool:
        wanted = load(pool)(*inputs(5))
        routed, bound = load(pool), []

        def handler() -> torch.Tensor:
            y = routed(*inputs(5))
            bound.append(routed._bound)
            return y

        seen = _handle(monkeypatch, experts_routed, "make_kernel", before, handler)
        _in_time(lambda: routed(*inputs(2)))
        assert torch.equal(seen[0], wanted)
        assert routed._bound is bound[0]  # what the handler has begun on it may still run


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_the_shared_pool_is_made_once_where_a_handler_asks_for_it_meanwhile(monkeypatch, before):
    monkeypatch.setattr(pools, "_default", None)
    seen = _handle(monkeypatch, pools, "make_pool", before, pools.default_pool)
    made = _in_time(pools.default_pool)
    with contextlib.closing(made):
        assert seen == [made] and pools.default_pool() is made


def test_ctrl_c_while_the_shared_pool_is_replaced_leaves_an_open_one(monkeypatch):
    shared, close = pools.default_pool(), WorkerPool.close

    def interrupted(pool: WorkerPool) -> None:
        close(pool)
        if pool is shared:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WorkerPool, "close", interrupted)
        pools.configure_default_pool()
    pools.default_pool().run(Call(0, 0, 0, 0, 0, 0))
