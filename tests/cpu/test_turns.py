"""Threads that share experts or their pool: a call is right or refused, whoever comes in between.

What a thread is overtaken by is put there: the other thread runs while this one is held up.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from pykernels.cpu.intrin.sync import clock_ns, pause
from pykernels.cpu.jit import task
from pykernels.cpu.moe.call import Workspace
from pykernels.errors import PykernelsError
from runtime.experts.launch import Part
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.workers import queue
from runtime.workers.pool import Call, TaskError, WorkerPool, configure_default_pool, make_pool
from runtime.workers.reduce import reduce

from .routed import SHAPE, TWO_CORES, elsewhere, inputs, load

NOTHING = Call(0, 0, 0, 0, 0, 0)


def _before_launch(routed: RoutedExperts, function: Callable[[], object]) -> list[object]:
    """What ``function`` gave on another thread, once, while a call of ``routed`` was to begin."""
    part, seen = routed._bind()[0], list[object]()
    launch = part._launch

    def late(*args: int) -> int:
        part._launch = launch
        seen.extend(elsewhere(function))
        return launch(*args)

    part._launch = late
    return seen


@task("turns-failing")
def _failing(job, index, worker):
    return 77


@task("turns-failing-late")
def _failing_late(job, index, worker):
    """After 200 us: another thread has the GIL then, which this one gave up."""
    end = clock_ns() + 200_000
    while clock_ns() < end:
        pause()
    return 77


@pytest.mark.parametrize("T", [1, 2, 7, 64])
@pytest.mark.parametrize("whose", ["the same experts", "another layer"])
def test_a_thread_that_was_overtaken_runs_its_own_call(pool, whose, T):
    routed = load(pool)
    other = routed if whose == "the same experts" else load(pool)
    fresh = load(pool)
    wanted, longer = fresh(*inputs(1)).clone(), fresh(*inputs(T)).clone()
    for _ in range(2):
        assert torch.equal(routed(*inputs(1)), wanted)
    seen = _before_launch(routed, lambda: other(*inputs(T)))
    assert torch.equal(routed(*inputs(1)), wanted)
    assert routed._bind()[0]._moe.job["T"][0] == 1  # more would go behind y's end
    assert torch.equal(seen[0], longer)
    for _ in range(2):
        assert torch.equal(other(*inputs(T)), longer)
        assert torch.equal(routed(*inputs(1)), wanted)


def test_room_for_a_result_is_never_that_of_another_layout(pool):
    """A thread is refused since another one's larger call runs: its room is of no use after."""
    routed = load(pool)
    one, many = routed(*inputs(1)).clone(), load(pool)(*inputs(64))
    routed(*inputs(1))
    tickets = _before_launch(routed, lambda: routed.submit(*inputs(64)))
    with pytest.raises(PykernelsError, match="still running on this pool"):
        routed(*inputs(1))
    assert torch.equal(routed.sync(tickets[0]), many)
    for _ in range(3):
        y = routed(*inputs(64))
        assert y.shape == many.shape and torch.equal(y, many)
    assert torch.equal(routed(*inputs(1)), one)


def test_two_threads_with_one_room_for_a_result_get_one_each(pool):
    routed = load(pool)
    wanted = routed(*inputs(2)).clone()
    routed(*inputs(2))
    seen = _before_launch(routed, lambda: routed(*inputs(2)))
    y = routed(*inputs(2))
    assert torch.equal(y, wanted) and torch.equal(seen[0], wanted)
    assert y.data_ptr() != seen[0].data_ptr()


def test_threads_in_a_heap_get_right_results_or_are_refused(pool):
    with WorkerPool(min(2, Topology.detect().usable)) as pool:
        layers = [load(pool), load(pool)]
        wanted = {T: layers[0](*inputs(T)).clone() for T in (1, 2, 33)}
        wrong, right = list[object](), [0]

        def call(routed: RoutedExperts, T: int) -> None:
            given = inputs(T)
            for _ in range(400):
                try:
                    y = routed(*given)
                except PykernelsError as error:
                    if not any(why in str(error) for why in ("prepares", "running", "in flight")):
                        wrong.append(error)
                    time.sleep(0)
                except BaseException as error:
                    wrong.append(error)
                else:
                    right[0] += 1
                    if not torch.equal(y, wanted[T]):
                        wrong.append(T)

        kinds = (layers[0], 1), (layers[0], 33), (layers[1], 1), (layers[0], 2)
        threads = [threading.Thread(target=call, args=kind) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and right[0] > 0
        assert torch.equal(layers[0](*inputs(33)), wanted[33])


@pytest.mark.parametrize("lay", ["rows as they lie", "rows that are copied"])
def test_a_refused_thread_leaves_the_one_that_prepares_its_call_alone(pool, monkeypatch, lay):
    routed, begin, said, held = load(pool), Part.begin, list[object](), list[object]()
    wanted = routed(*inputs(33)).clone()
    routed(*inputs(2))
    x, ids, weights = inputs(33)
    if lay == "rows that are copied":
        x = x.T.contiguous().T

    def late(self: Part) -> object:
        mine = weakref.ref(self.held[threading.get_ident()][0])
        said.extend(elsewhere(lambda: routed(*inputs(1))))
        held.append(mine() is not None)
        return begin(self)

    with monkeypatch.context() as patch:
        patch.setattr(Part, "begin", late)
        assert torch.equal(routed(x, ids, weights), wanted)
    assert "another thread prepares a call" in str(said[0]) and held == [True]
    assert not routed._bind()[0].held  # and nothing is kept for longer than it must


def test_a_call_that_another_thread_is_about_is_in_flight(pool):
    routed = load(pool)
    wanted = routed(*inputs(2)).clone()
    ticket = routed.submit(*inputs(2))
    state = pool._word[queue.STATE // 8]
    pool._word[queue.STATE // 8] = queue.DRIVEN  # as while its rows are waited for
    with pytest.raises(PykernelsError, match="a call of these experts is in flight"):
        routed.submit(*inputs(2))
    with pytest.raises(PykernelsError, match="still running"):
        pool.claim()
    pool._word[queue.STATE // 8] = state
    assert torch.equal(routed.sync(ticket), wanted)


def test_two_threads_that_come_first_share_what_they_bind(pool):
    routed = load(pool)
    make, bound = threading.Barrier(2), list[object]()

    def bind() -> None:
        make.wait()
        bound.append(routed._bind()[0])

    threads = [threading.Thread(target=bind) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bound[0] is bound[1] is routed._bind()[0]


def test_who_settles_beside_a_call_spoils_nothing():
    with WorkerPool(min(2, Topology.detect().usable)) as pool:
        routed, stop = load(pool), threading.Event()
        wanted = routed(*inputs(33)).clone()

        def settle() -> None:
            while not stop.is_set():
                pool.settle()
                time.sleep(0)

        thread = threading.Thread(target=settle)
        thread.start()
        try:
            for _ in range(300):
                assert torch.equal(routed(*inputs(33)), wanted)
        finally:
            stop.set()
            thread.join()
        assert routed.counters.calls == 301


CLOSINGS: dict[str, Callable[[WorkerPool], None]] = {
    "closed": lambda pool: pool.close(),
    "settled": lambda pool: pool.settle(),
    "settled, and another call": lambda pool: (pool.settle(), pool.start(NOTHING), pool.wait()),
    "settled, and another runs": lambda pool: (pool.settle(), pool.start(NOTHING)),
}


@pytest.mark.parametrize("ends", CLOSINGS.values(), ids=CLOSINGS)
def test_a_call_that_another_has_ended_gives_its_result(ends):
    with WorkerPool(1) as pool:
        routed = load(pool)
        wanted = routed(*inputs(3)).clone()
        for given in (inputs(3), (inputs(3)[0].T.contiguous().T, *inputs(3)[1:])):
            if pool._word[queue.STATE // 8] == queue.CLOSED:
                break
            ticket = routed.submit(*given)
            ends(pool)
            assert torch.equal(routed.sync(ticket), wanted)
            assert (routed.counters.tokens, routed.counters.seconds > 0) == (
                3 * routed.counters.calls, True,
            )  # fmt: skip
            with pytest.raises(PykernelsError, match="sync each ticket once"):
                routed.sync(ticket)
            pool.settle()


def test_a_call_in_flight_where_its_pool_is_left_gives_its_result():
    with WorkerPool(1) as pool:
        routed = load(pool)
        wanted = routed(*inputs(3)).clone()
        ticket = routed.submit(*inputs(3))
    assert torch.equal(routed.sync(ticket), wanted)
    with pytest.raises(PykernelsError, match="worker pool is closed"):
        pool.wait()
    configure_default_pool(1)
    try:
        shared = load(None)
        ticket = shared.submit(*inputs(3))
        configure_default_pool(1)
        assert torch.equal(shared.sync(ticket), wanted)
        assert torch.equal(shared(*inputs(3)), wanted)
    finally:
        configure_default_pool()


@TWO_CORES
def test_a_call_in_flight_on_several_nodes_that_are_closed_gives_its_result():
    with make_pool(2, True, "2", Topology.fake(2)) as pools:
        routed = load(pools)
        wanted = routed(*inputs(5)).clone()
        ticket = routed.submit(*inputs(5))
        pools.close()
        assert torch.equal(routed.sync(ticket), wanted)


def test_a_long_sum_is_made_where_the_pool_is_closed():
    pool = WorkerPool(1)
    pool.close()
    parts = [torch.randn(3, 1 << 16) for _ in range(2)]
    wanted, y = parts[0] + parts[1], torch.empty(3, 1 << 16)
    reduce(parts, y, pool)
    assert torch.equal(y, wanted)


def test_a_failed_call_that_another_has_ended_gives_no_result(pool):
    routed = load(pool)
    wanted = routed(*inputs(3)).clone()
    job = routed._bind()[0]._moe.job
    good, job["run_down"] = int(job["run_down"][0]), _failing.address
    first = routed.submit(*inputs(3))
    pool.settle()
    with pytest.raises(TaskError, match="down task .* of expert"):
        routed.sync(first)
    second = routed.submit(*inputs(3))
    pool.settle()
    pool.start(NOTHING)
    pool.wait()
    with pytest.raises(TaskError, match="down task .* of expert"):
        routed.sync(second)
    third = routed.submit(*inputs(3))
    pool.settle()
    with pytest.raises(TaskError):
        routed(*inputs(3))
    with pytest.raises(PykernelsError, match="a task of this call failed, or of a later one"):
        routed.sync(third)
    job["run_down"] = good
    assert torch.equal(routed(*inputs(3)), wanted)


def test_a_failure_is_told_to_the_thread_whose_call_it_was(pool, monkeypatch):
    first = Call(_failing.address, _failing.address, 0, 1, 1, 0)
    second = Call(
        _failing.address, _failing.address, 0, 0, 0, 0, rows=_failing.address, row_tasks=1
    )
    run, seen = queue.run, list[object]()

    def late(*given: object) -> object:
        monkeypatch.undo()
        ended = run(*given)
        seen.extend(elsewhere(lambda: pool.run(second)))  # fails as well, before that is told
        return ended

    monkeypatch.setattr(queue, "run", late)
    with pytest.raises(TaskError, match="^a task failed with status 77$"):
        pool.run(first)
    assert str(seen[0]) == "rows task 0 failed with status 77"


def test_the_last_failure_is_never_taken_for_none(pool):
    """Who looks while a later failure is recorded must not find that its call went well."""
    seen, ends = [0], threading.Event()

    def look() -> None:
        word, at = pool._word, queue.FAILED_CALL // 8
        while not ends.is_set():
            if (number := word[at]) != seen[-1]:
                seen.append(number)

    thread = threading.Thread(target=look)
    thread.start()
    failing = Call(_failing_late.address, _failing_late.address, 0, 1, 1, 0)
    for _ in range(500):
        with pytest.raises(TaskError):
            pool.run(failing)
    ends.set()
    thread.join()
    assert len(seen) > 1 and seen == sorted(seen)


@pytest.mark.parametrize("whose", ["the same experts", "another layer"])
def test_a_ticket_ends_its_own_call_only(pool, whose):
    first = load(pool)
    second = first if whose == "the same experts" else load(pool)
    wanted, other = first(*inputs(3)).clone(), second(*inputs(2)).clone()
    early = first.submit(*inputs(3))
    if second is not first:
        with pytest.raises(PykernelsError, match="not the call in flight"):
            second.sync(early)
    pool.settle()
    late = second.submit(*inputs(2))
    assert torch.equal(first.sync(early), wanted)
    assert torch.equal(second.sync(late), other)


def test_closing_a_pool_that_another_thread_prepares_a_call_on_refuses_that():
    pool = WorkerPool(1)
    routed = load(pool)
    routed(*inputs(2))
    part = routed._bind()[0]
    arrange = part.arrange

    def late(*inputs: torch.Tensor) -> None:
        arrange(*inputs)
        elsewhere(pool.close)

    part.arrange = late
    with pytest.raises(PykernelsError, match="worker pool is closed"):
        routed(*inputs(3))


def test_closing_a_pool_that_is_busy_ends_in_a_refusal():
    for _ in range(20):
        pool = WorkerPool(1, driver_works=False)
        routed = load(pool)
        wanted, seen = routed(*inputs(2)).clone(), list[object]()

        def call(routed: RoutedExperts = routed, wanted: torch.Tensor = wanted) -> None:
            while True:
                assert torch.equal(routed(*inputs(2)), wanted)

        thread = threading.Thread(target=lambda out=seen: out.extend(elsewhere(call)))
        thread.start()
        time.sleep(0.002)
        pool.close()
        thread.join(timeout=20)
        assert not thread.is_alive() and "worker pool is closed" in str(seen[0])


def test_experts_that_go_while_their_call_runs_wait_for_it(pool):
    routed = load(pool)
    ticket = routed.submit(*inputs(3))
    assert pool.running == ticket.calls[0]
    del routed
    assert pool.running is None


def test_a_call_of_another_thread_is_not_handed_out_for_it(pool):
    assert elsewhere(lambda: pool.start(NOTHING)) == [1]
    pool.settle()
    me = threading.get_ident()
    queue.publish(pool.control, pool.claim() or me, tuple(NOTHING))
    elsewhere(pool.hand_out)
    assert pool._word[queue.INSIDE // 8] == me
    pool.hand_out()
    assert pool._word[queue.INSIDE // 8] == 0
    pool.settle()


def test_what_a_call_uses_is_kept_while_it_runs(pool):
    routed, part = load(pool), None
    routed(*inputs(2))
    part = routed._bind()[0]
    ticket = routed._submit(*inputs(2))
    held = part.held[threading.get_ident()] = (ticket.y,)
    pool.hand_out()  # so ``abandon`` leaves it
    routed._abandon()
    assert part.held == {threading.get_ident(): held}
    pool.settle()
    routed._abandon()
    assert not part.held


def test_a_job_is_arranged_only_by_who_has_the_pool(pool):
    routed = load(pool)
    wanted = routed(*inputs(3)).clone()
    part = routed._bind()[0]
    count = part._moe.arranged
    with pytest.raises(PykernelsError, match="prepares a call"):
        part.arrange(*inputs(5), torch.empty(5, SHAPE.H))
    elsewhere(pool.claim)
    with pytest.raises(PykernelsError, match="prepares a call"):
        part.arrange(*inputs(5), torch.empty(5, SHAPE.H))
    assert part._moe.arranged == count
    assert torch.equal(routed(*inputs(3)), wanted)


def test_scratch_never_shrinks_where_two_threads_ask_for_it(monkeypatch):
    workspace, real, threads = Workspace(), torch.empty, list[threading.Thread]()

    def late(*size: int, **kwargs: torch.dtype) -> torch.Tensor:
        if not threads:  # another thread asks for more, and gets it or waits
            threads.append(threading.Thread(target=workspace.scratch, args=(1, 200)))
            threads[0].start()
            threads[0].join(timeout=0.05)
        return real(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", late)
    assert workspace.scratch(1, 100).numel() >= 100
    threads[0].join()
    assert workspace.scratch(1, 0).numel() == 200


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=TWO_CORES)])
def test_a_ticket_that_two_threads_sync_is_synced_once(monkeypatch, nodes):
    made = make_pool(2, True, "2", Topology.fake(2)) if nodes == 2 else WorkerPool(1)
    with made as pools:
        routed, seen = load(pools), list[object]()
        wanted = routed(*inputs(3)).clone()
        ticket, end = routed.submit(*inputs(3)), WorkerPool.end

        def late(*given: object) -> bool:
            monkeypatch.undo()
            counted = end(*given)
            seen.extend(elsewhere(lambda: routed.sync(ticket)))
            return counted

        monkeypatch.setattr(WorkerPool, "end", late)
        assert torch.equal(routed.sync(ticket), wanted) and routed.counters.calls == 2
        assert "another thread syncs this ticket" in str(seen[0])
