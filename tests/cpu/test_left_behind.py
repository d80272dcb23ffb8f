"""What a thread leaves to others: its ticket where it has ended, a failure's words, open pools."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from pykernels.cpu import raised
from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError
from runtime.experts.ticket import Ticket
from runtime.workers import control, queue
from runtime.workers.pool import Call, TaskError, WorkerPool

from .routed import elsewhere, inputs, load


@task("left-failing")
def _failing(job, index, worker):
    return 77


@task("left-raising")
def _raising(job, index, worker):
    if job == 0:
        raise ValueError("ours")
    return 0


def _ticket() -> Ticket:
    return Ticket(torch.empty(0), 0, 0, (), (), [], object(), {})


def test_a_ticket_whose_thread_has_ended_is_synced_by_another(pool):
    routed = load(pool)
    wanted = routed(*inputs(3)).clone()
    ticket = routed.submit(*inputs(3))
    assert elsewhere(ticket.take) == [True]  # and it never leaves
    assert torch.equal(routed.sync(ticket), wanted)
    with pytest.raises(PykernelsError, match="not the call in flight"):
        routed.sync(ticket)


def test_of_two_heirs_one_has_the_ticket(monkeypatch):
    """The second one comes where the first has seen that the thread has ended."""
    ticket, seen = _ticket(), list[object]()
    elsewhere(ticket.take)
    stays, may_go = threading.Event(), threading.Event()

    def second() -> None:
        seen.append(ticket.take())
        stays.set()
        may_go.wait()

    thread = threading.Thread(target=second)

    def ended(_: object) -> bool:
        monkeypatch.undo()
        thread.start()
        stays.wait()
        return True

    monkeypatch.setattr("runtime.experts.ticket._has_ended", ended)
    assert not ticket.take() and seen == [True]
    assert not ticket.take()  # it lives
    may_go.set()
    thread.join()
    assert ticket.take() and ticket.take()


def test_a_ticket_that_was_left_is_anybodys_and_leaving_twice_is_nothing():
    ticket = _ticket()
    ticket.leave()
    assert ticket.take()
    assert elsewhere(ticket.take) == [False]
    elsewhere(ticket.leave)  # not its own
    assert elsewhere(ticket.take) == [False]
    ticket.leave()
    ticket.leave()
    assert elsewhere(lambda: (ticket.take(), ticket.leave(), ticket.take())) == [(True, None, True)]


def test_a_failure_names_its_expert_whatever_call_has_come_since(pool, monkeypatch):
    routed, other = load(pool), load(pool)
    x, _, weights = inputs(1)
    mine, others = torch.tensor([[1, 2]]), torch.tensor([[4, 5]])
    wanted = other(x, others, weights).clone()
    job, seen = routed._bind()[0]._moe.job, list[object]()
    job["run_gate_up"] = _failing.address
    failure = WorkerPool._failure

    def late(*given: object) -> BaseException:
        monkeypatch.undo()
        told = failure(*given)
        seen.extend(elsewhere(lambda: other(x, others, weights)))
        return told

    for call in (routed, lambda *given: routed.sync(routed.submit(*given))):
        monkeypatch.setattr(WorkerPool, "_failure", late)
        with pytest.raises(TaskError, match="^gate-up task 0 of expert 1 failed") as caught:
            call(x, mine, weights)
        assert (caught.value.active, caught.value.expert) == (0, 1)
        assert torch.equal(seen.pop(), wanted)


def test_the_open_pools_can_be_looked_at_while_another_thread_makes_one(pool):
    made = list[WorkerPool]()

    def step(*_: object) -> object:
        if len(made) < 50:  # at every line, as a thread that has the GIL in between
            sys.settrace(None)
            made.extend(elsewhere(lambda: WorkerPool(1)))
            sys.settrace(step)
        return step

    sys.settrace(step)
    try:
        others = pool._elsewhere()
    finally:
        sys.settrace(None)
        for each in made:
            each.close()
    assert made and threading.get_ident() not in others


def test_what_another_pools_worker_raised_meanwhile_is_not_the_cause(pool):
    with WorkerPool(1, driver_works=False) as other:
        call = pool.start(Call(_raising.address, _raising.address, 0, 1, 1, 0))
        pool.settle()
        started = pool._word[queue.LAST_STARTED // 8]
        raised._kept.appendleft((other._threads[0].ident, started, KeyError, "theirs"))
        try:
            with pytest.raises(TaskError, match="raised ValueError"):
                pool.wait(call)
        finally:
            raised._kept.popleft()


def test_a_call_that_another_thread_is_about_is_counted_where_it_ends(pool, monkeypatch):
    routed = load(pool)
    ticket = routed.submit(*inputs(3))
    state = pool._word[queue.STATE // 8]
    pool._word[queue.STATE // 8] = queue.DRIVEN  # as while its rows are waited for

    def nap(_: float) -> None:
        pool._word[queue.STATE // 8] = state

    monkeypatch.setattr(control.time, "sleep", nap)
    routed.sync(ticket)
    assert (routed.counters.calls, routed.counters.tokens) == (1, 3)
    assert routed.counters.bytes == ticket.bytes > 0


def test_rows_of_a_call_that_has_ended_are_not_waited_for(pool, monkeypatch):
    monkeypatch.setattr(control.time, "sleep", lambda _: pytest.fail("it waits"))
    routed = load(pool)
    routed(*inputs(3))
    pool.wait_for_rows(pool.number)


def test_a_call_that_has_ended_goes_on_no_more_while_the_next_one_is_driven(pool):
    routed = load(pool)
    routed(*inputs(3))
    ended = pool.number
    ticket = routed.submit(*inputs(3))
    state = pool._word[queue.STATE // 8]
    pool._word[queue.STATE // 8] = queue.DRIVEN
    goes_on = pool.goes_on(ended), pool.goes_on(ended + 1)
    pool._word[queue.STATE // 8] = state
    routed.sync(ticket)
    assert goes_on == (False, True)


def test_a_forked_child_takes_no_result_of_a_call_that_the_parent_may_go_on_with(pool):
    routed = load(pool)
    ticket = routed.submit(*inputs(3))
    pool.settle()
    pool._word[queue.STATE // 8] = queue.FORKED  # as in its copy
    with pytest.raises(PykernelsError, match="belongs to the parent process"):
        routed.sync(ticket)
    pool._word[queue.STATE // 8] = queue.FREE
    assert torch.isfinite(routed.sync(ticket)).all()
