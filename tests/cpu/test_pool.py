"""The pool and its queue, with fake expert kernels: order, barriers, errors, sleep and wake."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from numba import carray, types

from pykernels.cpu.intrin.sync import as_pointer, atomic_add, atomic_load
from pykernels.cpu.jit import inlined, task
from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.machine.topology import Topology
from runtime.workers.pool import Call, TaskError, WorkerPool

USABLE = Topology.detect().usable

# The fake job is an int64 array: [i_chunks, active, status to return, index that fails,
# rounds that a task takes, pack tasks, address of their experts, counters before those of the pack
# tasks, stage that fails, row tasks], then a counter for each gate-up, down, pack and row task.
HEAD = 10
STAGES = ("rows", "pack", "gate-up", "down")


@inlined
def _head(job):
    return carray(as_pointer(job), (HEAD,), types.int64)


@inlined
def _done(job, counter):
    return atomic_load(job + 8 * (HEAD + counter)) == 1


@inlined
def _work(job, counter, stage, index):
    head = _head(job)
    for _ in range(head[4]):
        atomic_load(job)
    atomic_add(job + 8 * (HEAD + counter), 1)
    fails = head[8] == stage and head[3] == index
    return head[2] if fails else 0


@inlined
def _rows_done(job):
    head = _head(job)
    for index in range(head[9]):
        if not _done(job, head[7] + head[5] + index):
            return False
    return True


@task("fake-rows")
def fake_rows(job, index, worker):
    return _work(job, _head(job)[7] + _head(job)[5] + index, 0, index)


@task("fake-pack")
def fake_pack(job, piece, worker):
    return _work(job, _head(job)[7] + piece, 1, piece) if _rows_done(job) else 97


@task("fake-gate-up")
def fake_gate_up(job, index, worker):
    """Fails with 97 if the rows are not all done, with 98 if its expert's pack tasks are not."""
    head = _head(job)
    for piece in range(head[5]):
        if atomic_load(head[6] + 8 * piece) == index // head[0] and not _done(job, head[7] + piece):
            return 98
    return _work(job, index, 2, index) if _rows_done(job) else 97


@task("fake-down")
def fake_down(job, index, worker):
    """Fails with 99 if the expert's gate-up tasks are not all done, with 98 if the expert before
    has not been added to the same outputs."""
    chunks, active = _head(job)[0], _head(job)[1]
    expert = index % active
    for chunk in range(chunks):
        if not _done(job, expert * chunks + chunk):
            return 99
    if expert > 0 and not _done(job, active * chunks + index - 1):
        return 98
    return _work(job, active * chunks + index, 3, index)


class FakeCall:
    def __init__(
        self, active, i_chunks, down_chunks,
        status=0, failing=-1, spin=0, pieces=None, stage="gate-up", rows=0, splits=1,
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
            active, i_chunks, down_chunks, splits,
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


# The real counts up to 4: a machine with many cores tests them, and its most.
@pytest.fixture(
    params=sorted({*range(1, min(USABLE, 4) + 1), USABLE}), ids=lambda n: f"{n} threads"
)
def pool(request):
    with WorkerPool(request.param) as pool:
        yield pool


CALLS = {
    "one of each": FakeCall(1, 1, 1),
    "DeepSeek-V3 sized": FakeCall(8, 64, 224),
    "one expert: every down task waits at one barrier": FakeCall(1, 1, 50),
    "more experts than down tasks": FakeCall(40, 3, 2),
    "outputs split over the experts": FakeCall(6, 4, 8, splits=3, spin=2000),
    "more splits than experts": FakeCall(6, 4, 8, splits=7),
    "a split waits for the one before": FakeCall(2, 1, 1, splits=2, spin=2_000_000),
    "pack tasks of one expert": FakeCall(3, 4, 5, spin=200_000, pieces=[41, 0, 0]),
    "row tasks": FakeCall(3, 4, 5, spin=200_000, rows=41),
    "row tasks, ragged pack tasks": FakeCall(3, 4, 5, spin=20_000, pieces=[2, 0, 1], rows=40),
}


@pytest.mark.parametrize("fake", CALLS.values(), ids=CALLS)
def test_every_task_runs_once_and_after_its_barriers(pool, fake):
    for _ in range(10):
        fake.run(pool)
        assert (fake.counts == 1).all()


@pytest.mark.parametrize(
    ("driver_works", "spin_us"),
    [(True, 0.0), (False, 50.0), (False, 0.0)],
)
def test_waiting_for_the_rows_leaves_the_rest_running(driver_works, spin_us):
    with WorkerPool(USABLE, driver_works, spin_us=spin_us) as pool:
        for rows, spin in ((40, 20_000), (0, 20_000), (1, 20_000), (2000, 0)):
            fake = FakeCall(3, 4, 5, spin=spin, pieces=[2, 0, 1], rows=rows)
            for _ in range(5):
                fake.job[HEAD:] = 0
                pool.start(fake.call)
                pool.wait_for_rows()
                assert (fake.counts[len(fake.counts) - rows :] == 1).all()
                pool.wait()
                assert (fake.counts == 1).all()


def test_an_empty_call_ends_and_reports_its_time(pool):
    for _ in range(20):
        pool.start(Call(0, 0, 0, 0, 0, 0))
        assert 0 <= pool.wait() < 1
    assert 1e-6 < FakeCall(2, 2, 2, spin=200_000).run(pool) < 10


FAILURES = [
    # 4 experts, 3 gate-up and 5 down tasks each, pack tasks 0 and 1 of expert 0, 2 of expert 3, and
    # 6 row tasks.
    pytest.param("gate-up", 7, 2, id="gate-up, the second task of expert 2"),
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
    assert (error.status, error.stage) == (42, stage)
    assert (error.index, error.active) == (index, active)
    of = "" if active is None else f" of active expert {error.active}"
    assert str(error) == f"{stage} task {error.index}{of} failed with status 42"
    assert (fake.counts == 1).all()  # the others ran
    fake = FakeCall(4, 4, 4)
    fake.run(pool)
    assert (fake.counts == 1).all()


@task("raises")
def raises(job, index, worker):
    if index == 3:
        raise ValueError("a shape", 7)
    return 0


RAISING = Call(raises.address, raises.address, 0, 2, 4, 0)


def test_what_a_task_raises_is_the_cause(pool):
    pool.start(RAISING)
    with pytest.raises(TaskError, match="^gate-up task 3 of .* 0 raised ValueError") as caught:
        pool.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.args == ("a shape", 7)


def test_misuse_is_refused(pool):
    fake = FakeCall(2, 2, 2, spin=200_000)
    with pytest.raises(PykernelsError, match="no call is running"):
        pool.wait()
    pool.start(fake.call)
    with pytest.raises(PykernelsError, match="still running"):
        pool.start(fake.call)
    pool.settle()
    assert (fake.counts == 1).all() and pool.running is None
    pool.close()
    pool.close()
    with pytest.raises(PykernelsError, match="closed"):
        pool.start(fake.call)


REFUSED = {
    "more threads than cores": ({"threads": USABLE + 1}, f"{USABLE} cores are usable"),
    "threads as text": ({"threads": "2"}, "threads asked for, which is no whole number"),
    "no time to spin": ({"spin_us": float("nan")}, "is no time to spin"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_pool_that_cannot_be_is_refused(given, message):
    with pytest.raises(PykernelsError, match=message):
        WorkerPool(**given)


def test_the_system_may_refuse_a_core_or_a_thread(monkeypatch):
    def refuse_core(thread, cores):
        raise OSError(22, "Invalid argument")

    def refuse_thread(thread):  # as a cgroup's pids.max does, or ulimit -u
        raise RuntimeError("can't start new thread")

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse_core)
        with pytest.raises(PykernelsError, match="cannot be pinned to core"):
            WorkerPool(1, driver_works=False)
    assert threading.active_count() == before
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    with pytest.raises(PykernelsError, match="a worker thread: can't start .*ulimit -u"):
        WorkerPool(1, driver_works=False)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_a_pool_ends_its_threads(closed):
    before = threading.active_count()
    pool = WorkerPool(USABLE)
    pool.start(FakeCall(2, 2, 2, spin=200_000).call)
    if closed:
        pool.close()
    del pool
    assert threading.active_count() == before


def test_leaving_the_process_does_not_hang():
    """While a call runs, with a pool that outlives the modules."""
    script = """
import sys
from tests.cpu.test_pool import FakeCall, WorkerPool
sys.kept = pool = WorkerPool()
fake = FakeCall(2, 2, 2, spin=2_000_000)
pool.start(fake.call)
"""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


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


def test_workers_are_pinned_to_different_cores():
    with WorkerPool(USABLE) as pool:
        pinned = [os.sched_getaffinity(thread.native_id) for thread in pool._threads]
    assert all(len(cores) == 1 for cores in pinned)
    assert len(set.union(set(), *pinned)) == USABLE - 1


@pytest.mark.parametrize("driver_works", [True, False])
def test_threads_are_the_physical_cores_or_as_asked(driver_works):
    topology = Topology.detect()
    with WorkerPool(driver_works=driver_works) as pool:  # beside a GPU a core is left to its driver
        assert pool.threads == topology.default_threads(driver_works)
        assert len(pool._threads) == pool.threads - driver_works
    with env.override(threads=1), WorkerPool(driver_works=driver_works) as pool:
        assert pool.threads == 1
