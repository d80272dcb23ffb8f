"""The pool and its queue, with fake expert kernels: order, barriers, errors, sleep and wake."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from numba import carray, types

from pykernels.cpu.intrin.sync import as_pointer, atomic_add, atomic_load
from pykernels.cpu.jit import inlined, task
from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.machine.topology import Topology
from runtime.workers import queue
from runtime.workers.pool import (
    Call,
    TaskError,
    WorkerPool,
    configure_default_pool,
    default_pool,
    make_pool,
)

USABLE = Topology.detect().usable

# The fake job is an int64 array: [i_chunks, active, status to return, index that fails (-2: all),
# rounds that a gate-up task takes, pack tasks, address of their experts, tasks without them, stage
# that fails, row tasks], then a counter for each gate-up task, each down tile, each pack task and
# each row task.
HEAD = 10
STAGES = ("rows", "pack", "gate-up", "down")


@inlined
def _head(job):
    return carray(as_pointer(job), (HEAD,), types.int64)


@inlined
def _status(job, stage, index):
    head = _head(job)
    fails = head[8] == stage and (head[3] == index or head[3] == -2)
    return head[2] if fails else 0


@task("fake-rows")
def fake_rows(job, index, worker):
    head = _head(job)
    for _ in range(head[4]):
        atomic_load(job)
    atomic_add(job + 8 * (HEAD + head[7] + head[5] + index), 1)
    return _status(job, 0, index)


@inlined
def _rows_are_there(job):
    head = _head(job)
    for index in range(head[9]):
        if atomic_load(job + 8 * (HEAD + head[7] + head[5] + index)) != 1:
            return False
    return True


@task("fake-pack")
def fake_pack(job, piece, worker):
    """Fails with 97 if the rows are not all done."""
    head = _head(job)
    if not _rows_are_there(job):
        return 97
    queue = atomic_load(job + 8 * 7)
    for _ in range(head[4]):
        atomic_load(job)
    atomic_add(job + 8 * (HEAD + queue + piece), 1)
    return _status(job, 1, piece)


@task("fake-gate-up")
def fake_gate_up(job, index, worker):
    """Fails with 97 if the rows are not all done, with 98 if its expert's pack tasks are not."""
    head = _head(job)
    if not _rows_are_there(job):
        return 97
    for piece in range(head[5]):
        if atomic_load(head[6] + 8 * piece) == index // head[0]:
            if atomic_load(job + 8 * (HEAD + head[7] + piece)) != 1:
                return 98
    for _ in range(head[4]):
        atomic_load(job)
    atomic_add(job + 8 * (HEAD + index), 1)
    return _status(job, 2, index)


@task("fake-down")
def fake_down(job, index, worker):
    """Fails with 99 if the expert's gate-up tasks are not all done, with 98 if the expert before
    has not been added to the same outputs."""
    head = _head(job)
    chunks, active = head[0], head[1]
    expert = index % active
    for chunk in range(chunks):
        if atomic_load(job + 8 * (HEAD + expert * chunks + chunk)) != 1:
            return 99
    if expert > 0 and atomic_load(job + 8 * (HEAD + active * chunks + index - 1)) != 1:
        return 98
    for _ in range(head[4]):
        atomic_load(job)
    status = _status(job, 3, index)
    atomic_add(job + 8 * (HEAD + active * chunks + index), 1)
    return status


class FakeCall:
    def __init__(
        self, active, i_chunks, down_chunks,
        status=0, failing=-1, spin=0, pieces=None, stage="gate-up", rows=0, legs=1,
    ):  # fmt: skip
        pieces = pieces or [0] * active  # pack tasks of each expert
        self.pieces = np.array(pieces, np.int64)
        self.piece_active = np.repeat(np.arange(active), pieces)
        queue, packs = active * i_chunks + down_chunks * active, len(self.piece_active)
        self.job = np.zeros(HEAD + queue + packs + rows, np.int64)
        self.job[:HEAD] = (
            i_chunks, active, status, failing, spin, packs, self.piece_active.ctypes.data, queue,
            STAGES.index(stage), rows,
        )  # fmt: skip
        self.call = Call(
            fake_gate_up.address, fake_down.address, self.job.ctypes.data,
            active, i_chunks, down_chunks, legs,
            fake_pack.address, packs, self.piece_active.ctypes.data, self.pieces.ctypes.data,
            fake_rows.address, rows,
        )  # fmt: skip

    def run(self, pool: WorkerPool) -> float:
        self.job[HEAD:] = 0
        pool.start(self.call)
        return pool.wait()

    @property
    def counts(self) -> np.ndarray:
        return self.job[HEAD:]


CUTS = [
    pytest.param(1, 1, 1, id="one of each"),
    pytest.param(6, 4, 8, id="a small decode step"),
    pytest.param(8, 64, 224, id="DeepSeek-V3 sized"),
    pytest.param(1, 1, 50, id="one expert: every down task waits at one barrier"),
    pytest.param(40, 3, 2, id="more experts than down tasks"),
]


# The real counts up to 4: a machine with many cores tests them, and its most.
@pytest.fixture(
    params=sorted({*range(1, min(USABLE, 4) + 1), USABLE}), ids=lambda n: f"{n} threads"
)
def pool(request):
    with WorkerPool(request.param) as pool:
        yield pool


@pytest.mark.parametrize(("active", "i_chunks", "down_chunks"), CUTS)
def test_every_task_runs_once_and_behind_its_barrier(pool, active, i_chunks, down_chunks):
    fake = FakeCall(active, i_chunks, down_chunks)
    for _ in range(50):
        fake.run(pool)
        assert (fake.counts == 1).all()


@pytest.mark.parametrize("legs", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(("active", "i_chunks", "down_chunks"), CUTS)
def test_legs_of_a_run_of_outputs_go_on_behind_each_other(
    pool, active, i_chunks, down_chunks, legs
):
    """Every expert once and in order, also where legs are more than experts."""
    fake = FakeCall(active, i_chunks, down_chunks, legs=legs, stage="down", spin=2000)
    for _ in range(3):
        fake.run(pool)
        assert (fake.counts == 1).all()


def test_a_leg_waits_for_the_one_before_it_in_every_call(pool):
    """Two threads take both legs of the one run at once, and each leg is one slow expert."""
    fake = FakeCall(2, 1, 1, legs=2, spin=10_000_000)
    for _ in range(10):
        fake.run(pool)
        assert (fake.counts == 1).all()


def test_barriers_hold_when_gate_up_is_slow(pool):
    fake = FakeCall(4, 3, 16, spin=20_000)
    for _ in range(10):
        fake.run(pool)
        assert (fake.counts == 1).all()


@pytest.mark.parametrize(
    "pieces", [[1, 1, 1], [0, 5, 0], [2, 0, 3]], ids=["one each", "one expert", "ragged"]
)
@pytest.mark.parametrize("spin", [0, 20_000], ids=["quick", "slow"])
def test_gate_up_waits_for_its_own_experts_inputs(pool, pieces, spin):
    fake = FakeCall(3, 4, 5, spin=spin, pieces=pieces)
    for _ in range(20):
        fake.run(pool)
        assert (fake.counts == 1).all()


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("spin", [0, 20_000], ids=["quick", "slow"])
def test_all_that_read_rows_wait_for_all_of_them(pool, rows, spin):
    for pieces in ([2, 0, 1], [0, 0, 0]):
        fake = FakeCall(3, 4, 5, spin=spin, pieces=pieces, rows=rows)
        for _ in range(20):
            fake.run(pool)
            assert (fake.counts == 1).all()


@pytest.mark.parametrize("driver_works", [True, False])
@pytest.mark.parametrize("spin_us", [0.0, 50.0], ids=["sleeps at once", "spins"])
def test_who_waits_for_rows_finds_them_done_and_the_call_goes_on(driver_works, spin_us):
    with WorkerPool(USABLE, driver_works, spin_us=spin_us) as pool:
        for rows, spin in ((40, 20_000), (0, 20_000), (1, 20_000), (2000, 0)):
            fake = FakeCall(3, 4, 5, spin=spin, pieces=[2, 0, 1], rows=rows)
            for _ in range(20):
                fake.job[HEAD:] = 0
                pool.start(fake.call)
                pool.wait_for_rows()
                assert (fake.counts[len(fake.counts) - rows :] == 1).all()
                pool.wait()
                assert (fake.counts == 1).all()


def test_a_driver_that_only_waits_gets_its_calls_done():
    with WorkerPool(1, driver_works=False) as pool:
        for _ in range(20):
            fake = FakeCall(3, 4, 5)
            fake.run(pool)
            assert (fake.counts == 1).all()
        time.sleep(0.01)  # the worker is asleep now: it must wake
        assert FakeCall(3, 4, 5).run(pool) >= 0


def test_an_empty_call_ends(pool):
    for _ in range(20):
        pool.start(Call(0, 0, 0, 0, 0, 0))
        assert 0 <= pool.wait() < 1


@pytest.mark.parametrize("spin_us", [0.0, 50.0], ids=["sleeps at once", "spins"])
def test_calls_far_apart_and_back_to_back(spin_us):
    with env.override(spin_us=spin_us), WorkerPool(USABLE) as pool:
        fake = FakeCall(5, 4, 9)
        for pause in (0.0, 0.0, 0.002, 0.0, 0.02, 0.0, 0.0):
            time.sleep(pause)
            for _ in range(30):
                fake.run(pool)
                assert (fake.counts == 1).all()


FAILURES = [
    # 4 experts, 3 gate-up and 5 down tasks each, pack tasks 0 and 1 of expert 0, 2 of expert 3, and
    # 6 row tasks.
    pytest.param("gate-up", 7, 2, id="gate-up, the second task of expert 2"),
    pytest.param("gate-up", 0, 0, id="the first of all"),
    pytest.param("down", 13, 1, id="down, expert 1 in run 3"),
    pytest.param("pack", 2, 3, id="pack, the piece of expert 3"),
    pytest.param("rows", 5, None, id="rows, which are of no expert"),
]


@pytest.mark.parametrize(("stage", "index", "active"), FAILURES)
def test_a_failing_task_is_named_and_the_pool_goes_on(pool, stage, index, active):
    fake = FakeCall(4, 3, 5, status=42, failing=index, stage=stage, pieces=[2, 0, 0, 1], rows=6)
    with pytest.raises(TaskError) as caught:
        fake.run(pool)
    error = caught.value
    assert (error.status, error.stage, error.index, error.active) == (42, stage, index, active)
    of = "" if active is None else f" of active expert {active}"
    assert str(error) == f"{stage} task {index}{of} failed with status 42"
    assert (fake.counts == 1).all()  # the others ran
    fake = FakeCall(4, 4, 4)
    fake.run(pool)
    assert (fake.counts == 1).all()


@task("raises")
def raises(job, index, worker):
    if index == 3:
        raise ValueError("a shape", 7)
    return 0


def test_what_a_task_raises_reaches_the_caller(pool):
    for _ in range(2):
        pool.start(Call(raises.address, raises.address, 0, 2, 4, 0))
        with pytest.raises(TaskError, match=r"^gate-up task 3 of .* 0 raised ValueError") as caught:
            pool.wait()
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.__cause__.args == ("a shape", 7)
    fake = FakeCall(4, 4, 4)
    fake.run(pool)
    assert (fake.counts == 1).all()


def test_what_nobody_waited_for_is_told_by_no_later_call(pool):
    pool.start(Call(raises.address, raises.address, 0, 2, 4, 0))
    pool.settle()
    FakeCall(4, 4, 4).run(pool)


def test_a_failure_is_told_whole_however_late(pool):
    number = pool.start(Call(raises.address, raises.address, 0, 2, 4, 0))
    pool.settle()
    FakeCall(1, 1, 1).run(pool)  # other numbers of tasks and experts
    with pytest.raises(TaskError, match="gate-up task 3 of active expert 0 raised ValueError"):
        pool.wait(number)
    again = pickle.loads(pickle.dumps(TaskError(5, "down", 3, 1, 7)))
    assert str(again) == "down task 3 of expert 7 failed with status 5"


def test_of_many_failures_one_is_told(pool):
    fake = FakeCall(6, 8, 9, status=5, failing=-2)
    for _ in range(20):
        with pytest.raises(TaskError, match=r"gate-up task \d+ of active expert \d failed .* 5$"):
            fake.run(pool)


def test_a_call_reports_the_time_it_took(pool):
    seconds = FakeCall(2, 2, 2, spin=200_000).run(pool)
    assert 1e-6 < seconds < 10


def test_misuse_is_told(pool):
    fake = FakeCall(2, 2, 2)
    with pytest.raises(PykernelsError, match="no call is running"):
        pool.wait()
    pool.start(fake.call)
    with pytest.raises(PykernelsError, match="still running"):
        pool.start(fake.call)
    pool.wait()
    pool.close()
    pool.close()
    with pytest.raises(PykernelsError, match="closed"):
        pool.start(fake.call)


def test_a_call_that_nobody_waits_for_can_be_settled(pool):
    fake = FakeCall(2, 2, 2, spin=200_000)
    pool.start(fake.call)
    pool.settle()
    assert (fake.counts == 1).all() and pool.running is None
    pool.settle()
    assert FakeCall(2, 2, 2).run(pool) >= 0


@pytest.mark.parametrize("threads", [USABLE + 1, 0, -1])
def test_more_threads_than_cores_are_refused(threads):
    with pytest.raises(PykernelsError, match=f"{USABLE} cores are usable"):
        WorkerPool(threads)


@pytest.mark.parametrize("threads", ["2", 1.0, True])
def test_threads_that_are_no_whole_number_are_refused(threads):
    with pytest.raises(PykernelsError, match="threads asked for, which is no whole number"):
        WorkerPool(threads)
    with pytest.raises(PykernelsError, match="threads asked for, which is no whole number"):
        make_pool(threads)


@pytest.mark.parametrize("spin_us", [float("nan"), float("inf"), -1, "50"])
def test_a_time_to_spin_that_is_none_is_refused(spin_us):
    with pytest.raises(PykernelsError, match="is no time to spin"):
        WorkerPool(1, spin_us=spin_us)


def test_closing_ends_the_threads():
    before = threading.active_count()
    pool = WorkerPool(USABLE)
    FakeCall(2, 2, 2).run(pool)
    pool.close()
    assert threading.active_count() == before


def test_a_dropped_pool_closes_itself():
    before = threading.active_count()
    pool = WorkerPool(USABLE)
    FakeCall(2, 2, 2).run(pool)
    del pool
    assert threading.active_count() == before


def test_workers_are_pinned_to_different_cores():
    with WorkerPool(USABLE) as pool:
        tids = [thread.native_id for thread in pool._threads]
        pinned = [os.sched_getaffinity(tid) for tid in tids]
    assert all(len(cores) == 1 for cores in pinned)
    assert len(set.union(set(), *pinned)) == USABLE - 1


def test_a_forked_child_is_refused_instead_of_hanging():
    with WorkerPool(USABLE) as pool:
        child = os.fork()
        if child == 0:
            try:
                pool.start(FakeCall(1, 1, 1).call)
            except PykernelsError as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_child_forked_during_a_call_is_refused_instead_of_waiting_for_ever():
    with WorkerPool(1, driver_works=False) as pool:  # the task stays with the parent's worker
        fake = FakeCall(1, 1, 1, spin=50_000_000)
        pool.start(fake.call)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits is ended
            for use in (pool.wait, pool.wait_for_rows):
                try:
                    use()
                except PykernelsError as error:
                    if "fork" not in str(error):
                        os._exit(8)
                else:
                    os._exit(9)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        pool.wait()
        assert (fake.counts == 1).all()


def test_the_shared_pool_can_be_replaced():
    first = default_pool()
    assert default_pool() is first
    second = configure_default_pool(1)
    assert default_pool() is second and second.threads == 1
    FakeCall(2, 2, 2).run(second)
    configure_default_pool()


def test_by_default_there_is_one_thread_on_each_physical_core():
    topology = Topology.detect()
    with WorkerPool() as pool:
        assert pool.threads == topology.default_threads()
    with WorkerPool(driver_works=False) as pool:  # a core is left to whoever feeds the GPU
        assert pool.threads == topology.default_threads(driver_works=False)
        assert len(pool._threads) == max(1, len(topology.physical) - 1)


@pytest.mark.parametrize(
    ("driver_works", "asked", "spin_us"), [(True, "", 50), (False, "", 1000), (False, "7.5", 7.5)]
)
def test_idle_threads_spin_longer_beside_a_gpu(driver_works, asked, spin_us):
    with env.override(spin_us=asked), WorkerPool(1, driver_works) as pool:
        assert pool._words[queue.SPIN_NS // 8] == 1000 * spin_us


def test_a_core_that_is_refused_is_told(monkeypatch):
    def refuse(thread, cores):
        raise OSError(22, "Invalid argument")

    before = threading.active_count()
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(PykernelsError, match="cannot be pinned to core"):
        WorkerPool(1, driver_works=False)
    assert threading.active_count() == before


def test_a_thread_that_is_refused_is_told(monkeypatch):
    """As a cgroup's pids.max does, or ulimit -u."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(PykernelsError, match="a worker thread: can't start .*ulimit -u"):
        WorkerPool(1, driver_works=False)


def test_threads_come_from_the_environment():
    with env.override(threads=1), WorkerPool() as pool:
        assert pool.threads == 1
