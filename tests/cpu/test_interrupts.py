"""Ctrl-C at any moment of a call: the next one is right, and nothing has to be settled by hand."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pykernels.cpu.moe.call import MoECall, Workspace
from pykernels.errors import PykernelsError
from runtime.experts import routed as experts_routed
from runtime.experts.launch import Part
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.profiling import roofline
from runtime.workers import control, queue
from runtime.workers.pool import Call, WorkerPool, make_pool

from .routed import SHAPE, TWO_CORES, elsewhere, inputs, load, packed
from .test_pool_process import make_until


def _interrupt(
    patch: pytest.MonkeyPatch, owner: object, name: str, before: bool, times: int = 1
) -> None:
    """Ctrl-C before or behind a function, the first ``times`` that it is called."""
    real, left = getattr(owner, name), [times]

    def function(*args: object, **kwargs: object) -> object:
        come = left[0] > 0
        left[0] -= come
        if come and before:
            raise KeyboardInterrupt
        result = real(*args, **kwargs)
        if come:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, function)


LIKE = [(Part, "repeat"), (Part, "make_spare"), (WorkerPool, "end"), (RoutedExperts, "_sync")]
OTHER = [
    (MoECall, "_plan"),
    (MoECall, "_bind"),
    (Workspace, "reserve"),
    (WorkerPool, "claim"),
    (WorkerPool, "reserve_barriers"),
    (Part, "arrange"),
    (Part, "begin"),
    (Part, "let_go"),
    *LIKE[1:],
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("T", "owner", "name"),
    [*((2, *at) for at in LIKE), *((65, *at) for at in OTHER)],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_next_call_is_right(pool, monkeypatch, T, owner, name, before):
    routed, other = load(pool), load(pool)
    wanted = {n: other(*inputs(n)).clone() for n in (2, 3)}
    other(*inputs(3))
    for kind in ("call", "submit"):
        assert torch.equal(routed(*inputs(2)), wanted[2])
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            _interrupt(patch, owner, name, before)
            if kind == "call":
                routed(*inputs(T))
            else:
                routed.sync(routed.submit(*inputs(T)))
        if kind == "submit" and pool.running is not None:  # in ``sync``: its ticket is the user's
            pool.settle()
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda out=results: out.append(other(*inputs(3))))
        thread.start()  # another thread may call: nothing is kept claimed
        thread.join()
        assert torch.equal(results[0], wanted[3])
        for n in (2, 3, 2):
            assert torch.equal(routed(*inputs(n)), wanted[n])


@pytest.mark.parametrize("T", [2, 65])
def test_ctrl_c_during_what_ctrl_c_asks_for(pool, monkeypatch, T):
    routed, other = load(pool), load(pool)
    wanted = routed(*inputs(2)).clone()
    for again in (routed, other):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            _interrupt(patch, WorkerPool, "end", before=True)
            _interrupt(patch, RoutedExperts, "_abandon", before=True)
            routed(*inputs(T))
        assert pool.running is not None
        for _ in range(2):
            assert torch.equal(again(*inputs(2)), wanted)


def test_a_ticket_outlives_ctrl_c_in_sync(pool, monkeypatch):
    routed = load(pool)
    wanted = routed(*inputs(2)).clone()
    ticket = routed.submit(*inputs(2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, WorkerPool, "end", before=True)
        routed.sync(ticket)
    assert torch.equal(routed.sync(ticket), wanted)


@TWO_CORES
@pytest.mark.parametrize("T", [3, 1100], ids=["on this thread", "on the workers"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_a_ticket_outlives_ctrl_c_in_the_sum_of_the_nodes(monkeypatch, T, before):
    with make_pool(2, True, "2", Topology.fake(2)) as pools:
        routed = load(pools)
        wanted = routed(*inputs(T)).clone()
        ticket = routed.submit(*inputs(T))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            _interrupt(patch, experts_routed, "reduce", before)
            routed.sync(ticket)
        assert torch.equal(routed.sync(ticket), wanted) and routed.counters.calls == 2
        with pytest.raises(PykernelsError, match="sync each ticket once"):
            routed.sync(ticket)


def test_where_a_ticket_was_lost_the_hint_is_named(pool):
    routed, other = load(pool), load(pool)
    routed.submit(*inputs(2))
    with pytest.raises(PykernelsError, match=r"in flight.*pool\.settle\(\)"):
        routed(*inputs(2))
    with pytest.raises(PykernelsError, match=r"still running.*settle\(\) of the pool"):
        other(*inputs(2))
    routed.pool.settle()
    assert routed(*inputs(2)).isfinite().all()


def test_a_call_that_is_left_behind_has_ended_also_where_another_thread_settles_it(pool):
    """What it writes goes behind that."""
    job = np.array([time.monotonic_ns() + int(0.3e9)])
    slow = make_until().address
    pool.claim()
    queue.publish(
        pool.control, threading.get_ident(), tuple(Call(slow, slow, job.ctypes.data, 1, 1, 1))
    )
    thread = threading.Thread(target=pool.settle)
    thread.start()
    while pool.running is not None:
        time.sleep(0.001)
    pool.abandon()
    assert time.monotonic_ns() >= job[0] and pool._word[queue.STATE // 8] == queue.FREE
    thread.join()


@TWO_CORES
@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("name", ["_launch", "wait", "claim"])
def test_the_next_call_on_several_nodes_is_right(monkeypatch, name, before):
    with make_pool(2, True, "2", Topology.fake(2)) as pools:
        routed = load(pools)
        wanted = routed(*inputs(3)).clone()
        for which in (0, 1):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                part = routed._bind()[which]
                _interrupt(patch, part if name == "_launch" else part.pool, name, before)
                routed(*inputs(3))
            assert torch.equal(routed(*inputs(3)), wanted)


def test_a_pool_is_left_free_where_packing_is_interrupted(pool, monkeypatch):
    routed = RoutedExperts(SHAPE, "bf16", pool, "generic")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, WorkerPool, "reserve_barriers", before=False)
        routed.load_expert(0, *packed().unpack(0))
    seen: list[float] = []

    def call() -> None:
        pool.start(Call(0, 0, 0, 0, 0, 0))
        seen.append(pool.wait())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(seen) == 1


def test_memory_that_was_refused_is_not_counted_on(pool, monkeypatch):
    routed, fresh = load(pool), load(WorkerPool(1))
    routed(*inputs(1))
    real = torch.zeros

    def refuse(*size: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("dtype") is torch.bfloat16:
            raise RuntimeError("not enough memory")
        return real(*size, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not enough memory"):
        patch.setattr(torch, "zeros", refuse)
        routed(*inputs(80))
    assert torch.equal(routed(*inputs(64)), fresh(*inputs(64)))
    assert len(pool.workspace.buffers["acc"]) >= 64


def _slow(seconds: float) -> tuple[Call, np.ndarray]:
    """A call of so many seconds, and its job."""
    job = np.array([time.monotonic_ns() + int(seconds * 1e9)])
    slow = make_until().address
    return Call(slow, slow, job.ctypes.data, 1, 1, 1), job


def test_closing_that_was_cut_short_is_done_by_the_next(monkeypatch):
    pool = WorkerPool(1, driver_works=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, queue, "stop", before=True)
        pool.close()
    assert pool._word[queue.STATE // 8] == queue.CLOSED and pool._threads[0].is_alive()
    for _ in range(2):
        pool.close()
        assert not pool._threads[0].is_alive()


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_a_call_whose_number_nobody_got_has_ended(pool, monkeypatch, before):
    call, job = _slow(0.1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, WorkerPool, "hand_out", before)
        pool.start(call)
    assert pool.running is None and time.monotonic_ns() >= job[0]


def test_a_pass_of_a_roof_has_ended(pool, monkeypatch):
    roof = roofline.ReadRoof(pool, 16 << 20)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupt(patch, roofline, "wait_all", before=True)
        roof.once(next(iter(roof.seen)))
    assert pool.running is None and roof.was_read


@pytest.mark.parametrize("times", [1, 3])
def test_experts_that_go_while_another_thread_waits_for_their_call_wait_too(
    pool, monkeypatch, times
):
    routed, seen = load(pool), list[object]()
    part = routed._bind()[0]
    routed.submit(*inputs(2))
    state = pool._word[queue.STATE // 8]
    pool._word[queue.STATE // 8] = queue.DRIVEN

    def nap(seconds: float) -> None:
        seen.append(part)
        if len(seen) <= times:
            raise KeyboardInterrupt
        pool._word[queue.STATE // 8] = state

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", nap)
        patch.setattr(sys, "unraisablehook", lambda told: seen.append(told.exc_type))
        del routed
    assert seen == [part] * (times + 1) + [KeyboardInterrupt] and pool.running is None


def test_a_pool_that_goes_is_closed(monkeypatch):
    pool, seen = WorkerPool(1, driver_works=False), list[object]()
    threads = pool._threads
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda told: seen.append(told.exc_type))
        _interrupt(patch, queue, "stop", before=True, times=2)
        del pool
    assert seen == [KeyboardInterrupt] and not threads[0].is_alive()


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
def test_a_step_that_can_never_be_done_is_not_taken_for_ever(error):
    def step() -> None:
        raise error("a module is empty")

    with pytest.raises(error, match="is empty"):
        control.until_done(step)


def _leave_a_claim(routed: RoutedExperts, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a call is prepared, and again while that is given up."""
    with patch.context() as both, pytest.raises(KeyboardInterrupt):
        _interrupt(both, Part, "arrange", before=True)
        _interrupt(both, WorkerPool, "release", before=True)
        routed(*inputs(5))


def test_a_claim_that_was_left_behind_goes_where_its_thread_settles(pool, monkeypatch):
    routed, other = load(pool), load(pool)
    wanted = other(*inputs(3)).clone()
    _leave_a_claim(routed, monkeypatch)
    assert "another thread prepares" in str(elsewhere(lambda: other(*inputs(3)))[0])
    pool.settle()
    assert torch.equal(elsewhere(lambda: other(*inputs(3)))[0], wanted)


def test_a_claim_of_a_thread_that_has_ended_bars_nobody(pool, monkeypatch):
    routed, other = load(pool), load(pool)
    wanted = other(*inputs(3)).clone()
    assert elsewhere(lambda: _leave_a_claim(routed, monkeypatch)) == [None]
    assert pool._word[queue.STATE // 8] > queue.FREE
    for layer in (other, routed):
        assert torch.equal(layer(*inputs(3)), wanted)


def test_experts_that_go_leave_the_claim_of_their_thread(pool):
    """Python may collect them while this thread prepares a call."""
    routed, other = load(pool), load(pool)
    routed(*inputs(2))
    wanted, arrange = other(*inputs(3)).clone(), Part.arrange
    routed(*inputs(2))
    held = [routed]
    del routed
    part = other._bind()[0]

    def late(*given: torch.Tensor) -> None:
        arrange(part, *given)
        held.clear()

    part.arrange = late
    assert torch.equal(other(*inputs(3)), wanted)


STRESS = """
import os, random, signal, threading, time
import torch
from runtime.workers.pool import WorkerPool
from tests.cpu.routed import inputs, load

pool = WorkerPool(1)
routed, armed, stop = load(pool), False, False
wanted = {T: routed(*inputs(T)).clone() for T in (1, 9)}
given = {T: inputs(T) for T in wanted}

def handler(*_):
    if armed:
        raise KeyboardInterrupt

def shoot():
    draw = random.Random(0)
    while not stop:
        time.sleep(draw.random() * 0.005)
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, handler)
thread = threading.Thread(target=shoot)
interrupted = calls = 0
end = time.monotonic() + 2.5
thread.start()
while time.monotonic() < end:
    try:
        T = (1, 9, 1, 1)[(calls + interrupted) % 4]
        armed = True
        y = routed(*given[T])
        armed = False
        assert torch.equal(y, wanted[T])
        calls += 1
    except KeyboardInterrupt:
        armed = False
        interrupted += 1
stop = True
thread.join()
for T in wanted:
    assert torch.equal(routed(*given[T]), wanted[T])
assert calls > 20 and interrupted > 20, (calls, interrupted)
"""


def test_hundreds_of_ctrl_c_at_random_moments():
    command = [sys.executable, "-c", STRESS]
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
