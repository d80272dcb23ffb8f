"""The ring and its pool, with fake tasks: order, barriers, errors, sleep and wake."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pykernels.cpu.intrin.sync import atomic_add, atomic_load, atomic_store
from pykernels.cpu.jit import task
from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.machine.topology import Topology
from runtime.workers.fence import FencedJobs
from runtime.workers.job import Job, Jobs
from runtime.workers.pool import TaskError, WorkerPool

USABLE = Topology.detect().usable

# The record of fake jobs: [tasks to open, loops of a task, index that fails, status, counter of the
# job before, its tasks], then a counter.
OPENS, SPIN, FAILS, STATUS, BEFORE, EXPECTED, COUNT = range(7)


@task("fake-open")
def fake_open(record, index, worker):
    """As many tasks as the record says; -5 if the job before is not complete."""
    before = atomic_load(record + 8 * BEFORE)
    if before != 0 and atomic_load(before) != atomic_load(record + 8 * EXPECTED):
        return -5
    return atomic_load(record + 8 * OPENS)


@task("fake")
def fake(record, index, worker):
    for _ in range(atomic_load(record + 8 * SPIN)):
        atomic_load(record)
    atomic_add(record + 8 * COUNT, 1)
    fails = atomic_load(record + 8 * FAILS) == index
    return atomic_load(record + 8 * STATUS) if fails else 0


@task("raises")
def raises(record, index, worker):
    if index == 3:
        raise ValueError("a shape", 7)
    return 0


class Chain:
    """Jobs of so many tasks, each opened when the one before is complete."""

    def __init__(self, *tasks: int, spin: int = 0, fails: int = -1, status: int = 42) -> None:
        self.tasks, self.records, jobs = tasks, np.zeros((len(tasks), 8), np.int64), []
        for i, count in enumerate(tasks):
            at = self.records[i].ctypes.data
            self.records[i, :4] = count, spin, fails if i + 1 == len(tasks) else -1, status
            if i:
                self.records[i, BEFORE] = self.records[i - 1].ctypes.data + 8 * COUNT
                self.records[i, EXPECTED] = tasks[i - 1]
            after = 1 if i else 0
            jobs.append(Job(f"fake {i}", fake.address, at, fake_open.address, after=after))
        self.jobs = Jobs(jobs)

    def run(self, pool: WorkerPool) -> None:
        self.records[:, COUNT] = 0
        pool.run(self.jobs)

    @property
    def ran(self) -> bool:
        return bool((self.records[:, COUNT] == self.tasks).all())


@task("fake-wait-open")
def wait_open(record, index, worker):
    """As many tasks as the record says; -5 if not all tasks of the jobs that it names are done."""
    for i in range(atomic_load(record + 8 * BEFORE)):
        at = atomic_load(record + 8 * (COUNT + 1 + i))
        if atomic_load(at + 8 * COUNT) != atomic_load(at + 8 * OPENS):
            return -5
    return atomic_load(record + 8 * OPENS)


class Graph:
    """Jobs that wait for some of those before them: the numbers of these, for each."""

    def __init__(self, waits: list[tuple[int, ...]], tasks: list[int], spin: int) -> None:
        self.tasks, self.records = tasks, np.zeros((len(waits), 16), np.int64)
        jobs = []
        for i, before in enumerate(waits):
            record = self.records[i]
            record[[OPENS, SPIN, FAILS, BEFORE]] = tasks[i], spin * (1 + i % 3), -1, len(before)
            for k, j in enumerate(before):
                record[COUNT + 1 + k] = self.records[j].ctypes.data
            at, after = record.ctypes.data, tuple(i - j for j in before)
            jobs.append(Job(f"job {i}", fake.address, at, wait_open.address, after=after))
        self.jobs = Jobs(jobs)

    def run(self, pool: WorkerPool) -> None:
        self.records[:, COUNT] = 0
        pool.run(self.jobs)
        assert self.records[:, COUNT].tolist() == self.tasks


GRAPHS = {
    "two in parallel": [(), (0,), (0,), (1, 2)],
    "a fork in each layer": [
        w for i in range(0, 60, 3) for w in ((i - 1,) if i else (), (i,), (i, i - 2) if i else (0,))
    ]
    + [tuple(range(57, 60))],
    "one far back": [(), *[(0,)] * 5, (1, 3), (2, 4, 5, 6)],
    "nothing waits but the last": [*[()] * 6, tuple(range(6))],
}


@pytest.mark.parametrize("waits", GRAPHS.values(), ids=GRAPHS)
def test_a_job_waits_for_all_that_it_names(pool, waits):
    for tasks, spin in (([1] * len(waits), 0), ([1 + i % 4 for i in range(len(waits))], 2000)):
        graph = Graph(waits, tasks, spin)
        for _ in range(20):
            graph.run(pool)


@task("draw")
def draw(record, index, worker):
    """Draws twice the token, and counts the step."""
    token = atomic_load(atomic_load(record))
    atomic_store(atomic_load(record + 8), 2 * token)
    atomic_add(record + 16, 1)
    return -7 if token == atomic_load(record + 24) else 0


@pytest.mark.parametrize("ends_with", ["token", "failure", "request"])
def test_batches_behind_a_fence(pool, ends_with):
    """Each doubles the token of the one before, until an end token is drawn, a task fails or
    somebody asks for something: what is in the ring then is walked past."""
    inputs, drawn, give_up = (
        np.zeros((2, 4), np.int64),
        np.zeros(4, np.int64),
        np.zeros(1, np.int64),
    )
    record = np.array([inputs.ctypes.data, drawn.ctypes.data, 0, 0], np.int64)
    record[3] = 16 if ends_with == "failure" else -1
    some = [Job(f"beside {i}", 0, 0, tasks=0, after=0) for i in range(3)]
    last = Job("draw", draw.address, record.ctypes.data, after=(1, 2, 3))
    jobs = Jobs([*some, last])
    fenced = [FencedJobs(jobs, pool.ring, inputs, drawn, give_up) for _ in range(2)]
    ends = frozenset({32 if ends_with == "token" else 33})
    inputs[:, 0], seen = (1, 10), []
    running = pool.start(jobs)
    for step in range(1, 20):
        behind, next_inputs = fenced[step % 2], np.array([[0, 0], [10 + step, 0]])
        arrange = partial(behind.arrange, next_inputs, 1, ends)
        following = pool.start_behind(behind.jobs, behind, arrange)
        if ends_with == "request" and step == 5:
            give_up[0] = 1
        pool.wait(running)
        pool.wait_for_fence(following)
        seen.append(int(behind.kept[0]))
        if not behind.passed:
            break
        assert inputs[:, 0].tolist() == [2**step, 10 + step]
        running = following
    assert pool.wait(following).error is None
    if ends_with != "request":  # which may be heard of before or behind the fence
        assert seen == [2**step for step in range(1, 6)]
    assert record[2] == len(seen), "nothing of what was given up has run"
    assert (running.error is not None) == (ends_with == "failure")
    assert pool.wait(pool.start(jobs)).error is None or ends_with == "failure"


def test_jobs_that_nothing_waits_for_are_refused():
    """The end of a batch is the end of its last job."""
    records = np.zeros(8, np.int64)
    jobs = [Job(name, fake.address, records.ctypes.data, after=0) for name in "ab"]
    with pytest.raises(AssertionError, match="nothing waits for a"):
        Jobs(jobs)


# The real counts up to 4: a machine with many cores tests them, and its most.
@pytest.fixture(
    params=sorted({*range(1, min(USABLE, 4) + 1), USABLE}), ids=lambda n: f"{n} threads"
)
def pool(request):
    with WorkerPool(request.param) as pool:
        yield pool


CHAINS = {
    "one task": Chain(1),
    "no task": Chain(0),
    "many jobs of few tasks": Chain(*[1, 3, 0, 2] * 25),
    "many tasks": Chain(2000, 1, 2000),
    "long tasks": Chain(5, 1, 4, spin=200_000),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_every_task_runs_once_and_jobs_in_order(pool, chain):
    for _ in range(10):
        chain.run(pool)
        assert chain.ran


@pytest.mark.parametrize(("driver_works", "spin_us"), [(True, 0.0), (False, 50.0), (False, 0.0)])
def test_sleepers_wake(driver_works, spin_us):
    with WorkerPool(USABLE, driver_works, spin_us=spin_us) as pool:
        for chain in CHAINS.values():
            for _ in range(5):
                chain.run(pool)
                assert chain.ran


def test_what_is_in_flight_ends_before_the_next(pool):
    first, second = Chain(4, 4, spin=100_000), Chain(3)
    in_flight = pool.start(first.jobs)
    second.run(pool)
    assert in_flight.done and first.ran and second.ran
    assert pool.wait(in_flight).seconds > 0


def test_threads_take_turns(pool):
    chains = [Chain(3, 2, 4) for _ in range(4)]
    wrong: list[int] = []

    def run(chain: Chain) -> None:
        for i in range(200):
            chain.run(pool)
            if not chain.ran:
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_failing_task_is_named_and_the_pool_goes_on(pool):
    chain = Chain(2, 6, fails=4)
    with pytest.raises(TaskError, match="^task 4 of fake 1 failed with status 42$") as caught:
        chain.run(pool)
    assert (caught.value.task, caught.value.status) == (4, 42)
    assert chain.ran  # the others too
    with pytest.raises(TaskError, match="^the setup of fake 0 failed with status -3$"):
        Chain(-3).run(pool)
    CHAINS["many tasks"].run(pool)
    assert CHAINS["many tasks"].ran


def test_what_a_task_raises_is_the_cause(pool):
    with pytest.raises(TaskError, match="^task 3 of raising raised ValueError: .*shape") as caught:
        pool.run(Jobs([Job("raising", raises.address, 0, tasks=4, after=0)]))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.args == ("a shape", 7)


def test_a_closed_pool_is_refused_and_has_ended_its_calls(pool):
    chain = Chain(2, 2, spin=200_000)
    in_flight = pool.start(chain.jobs)
    pool.close()
    pool.close()
    assert chain.ran and pool.wait(in_flight).error is None
    with pytest.raises(PykernelsError, match="closed"):
        chain.run(pool)


REFUSED = {
    "more threads than cores": (USABLE + 1, f"{USABLE} cores are usable"),
    "threads as text": ("2", "threads asked for, which is no whole number"),
}


@pytest.mark.parametrize(("threads", "message"), REFUSED.values(), ids=REFUSED)
def test_a_pool_that_cannot_be_is_refused(threads, message):
    with pytest.raises(PykernelsError, match=message):
        WorkerPool(threads)


def test_the_system_may_refuse_a_thread(monkeypatch):
    def refuse(thread):  # as a cgroup's pids.max does, or ulimit -u
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(PykernelsError, match="a worker thread: can't start .*ulimit -u"):
        WorkerPool(1, driver_works=False)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_a_pool_ends_its_threads(closed):
    before = threading.active_count()
    pool, chain = WorkerPool(USABLE), Chain(2, 2, spin=200_000)
    pool.start(chain.jobs, chain)
    if closed:
        pool.close()
    del pool
    assert threading.active_count() == before


def test_leaving_the_process_does_not_hang():
    """While a call runs, with a pool that outlives the modules."""
    script = """
import sys
from tests.cpu.test_pool import Chain, WorkerPool
sys.kept = pool = WorkerPool()
chain = Chain(2, 2, spin=2_000_000)
pool.start(chain.jobs)
"""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forked_child_is_refused_instead_of_hanging():
    with WorkerPool(USABLE) as pool:
        child = os.fork()
        if child == 0:
            try:
                Chain(1).run(pool)
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
    with WorkerPool(driver_works=driver_works) as pool:  # with a GPU a core is left to its driver
        assert pool.threads == topology.default_threads(driver_works)
        assert len(pool._threads) == pool.threads - driver_works
    with env.override(threads=1), WorkerPool(driver_works=driver_works) as pool:
        assert pool.threads == 1
