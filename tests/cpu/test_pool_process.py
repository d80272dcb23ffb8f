"""The pool in a process of its own: Ctrl-C during a call, and the ways to leave while one runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from pykernels.cpu.intrin.sync import atomic_load, clock_ns, pause
from pykernels.cpu.jit import task
from runtime.workers import queue
from runtime.workers.pool import WorkerPool

from ..forks import Forks
from .test_pool import FakeCall

FIRST = """
import tests.cpu.test_pool
from tests.cpu.test_pool_process import make_until
from runtime.workers import queue as tasks
tasks.compile_all(), make_until()
"""
HEAD = """
import sys, time
import numpy as np
from tests.cpu.test_pool import FakeCall
from tests.cpu.test_pool_process import make_until
from runtime.workers import queue as tasks
from runtime.workers.pool import Call, WorkerPool

pool = WorkerPool({threads}, driver_works={driver_works})
until = make_until().address
job = np.array([time.monotonic_ns() + int({seconds} * 1e9)])
slow = Call(until, until, job.ctypes.data, active=1, i_chunks=4, down_chunks=1)
"""
INTERRUPTED = """
try:
    pool.start(slow)
    print("running", flush=True)
    pool.wait()
except KeyboardInterrupt:
    now = time.monotonic_ns()
    assert now >= job[0], "the call was cut short"
    late = now - pool._words[tasks.FINISHED_AT // 8]
    assert late < 500_000_000, f"{late / 1e9:.2f} s after the call ended"
    assert FakeCall(2, 2, 2).run(pool) >= 0, "the pool is not usable"
    print("interrupted")
"""
LEAVINGS = {
    "the end of the script": "pool.start(slow)",
    "sys.exit": "pool.start(slow); sys.exit(0)",
    "workers asleep": "time.sleep(0.05)",
    "close while a call runs": "pool.start(slow); pool.close()",
    "a dropped pool": "pool.start(slow); del pool",
    "a pool that outlives the modules": "sys.kept = pool",
    "and its experts": (
        "from tests.cpu.routed import inputs, load; sys.kept = load(pool); sys.kept(*inputs(2))"
    ),
}
POOLS = [
    pytest.param({"threads": 1, "driver_works": True}, id="the driver alone"),
    pytest.param({"threads": 1, "driver_works": False}, id="a worker alone"),
    pytest.param({"threads": None, "driver_works": True}, id="all cores"),
]


def make_until():
    """A task that ends at the time in its job (``clock_ns``)."""

    @task("until")
    def until(job, index, worker):
        while clock_ns() < atomic_load(job):
            pause()
        return 0

    return until


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Scripts begin with the imports of ``HEAD`` done, and with what a pool calls compiled."""
    with contextlib.closing(Forks(FIRST)) as made:
        yield made


@pytest.mark.parametrize("kind", POOLS)
def test_ctrl_c_counts_when_the_call_has_ended(kind: dict[str, object], forks: Forks) -> None:
    process = forks.start(HEAD.format(seconds=1.5, **kind) + INTERRUPTED)
    assert process.stdout.readline() == "running\n"
    time.sleep(0.3)  # it is in the call now
    os.kill(process.pid, signal.SIGINT)
    ended = process.end()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")


FORKED = """
import os, signal, threading, warnings
from runtime.workers import pool as pools

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads

held, forked = threading.Event(), threading.Event()

def make():
    with pools._making.lock:
        held.set()
        forked.wait()

thread = threading.Thread(target=make)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)
    os._exit(pools.default_pool().threads < 1)
forked.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_another_thread_makes_the_shared_pool_can_make_its_own(forks: Forks) -> None:
    head = HEAD.format(seconds=0, threads=1, driver_works=True)
    ended = forks.run(head + FORKED)
    assert (ended.returncode, ended.stderr) == (0, "")


FORKED_BINDING = """
import os, signal, threading, warnings
from pykernels.errors import PykernelsError
from runtime.experts import routed as experts
from tests.cpu.routed import inputs, load

warnings.simplefilter("ignore", DeprecationWarning)
held, forked, make_kernel = threading.Event(), threading.Event(), experts.make_kernel

def make(*what):
    held.set()
    forked.wait()
    return make_kernel(*what)

routed, experts.make_kernel = load(pool), make
thread = threading.Thread(target=routed._bind)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)
    experts.make_kernel = make_kernel
    try:
        routed(*inputs(2))
    except PykernelsError as error:
        os._exit("belongs to the parent" not in str(error))
    os._exit(2)
forked.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_another_thread_binds_experts_is_refused_their_pool(forks: Forks) -> None:
    ended = forks.run(HEAD.format(seconds=0, threads=1, driver_works=True) + FORKED_BINDING)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_idle_workers_fall_asleep_and_are_counted_only_while_they_do() -> None:
    with WorkerPool(1, driver_works=False, spin_us=0) as pool:
        for _ in range(3):
            FakeCall(2, 2, 2).run(pool)
            until = time.monotonic() + 10
            while pool._words[queue.SLEEPERS // 8] < 1 and time.monotonic() < until:
                time.sleep(0.001)
            assert pool._words[queue.SLEEPERS // 8] == 1


@pytest.mark.parametrize("leaving", LEAVINGS.values(), ids=LEAVINGS)
def test_leaving_does_not_hang(leaving: str, forks: Forks) -> None:
    ended = forks.run(HEAD.format(seconds=0.2, threads=None, driver_works=True) + leaving)
    assert (ended.returncode, ended.stderr) == (0, "")
