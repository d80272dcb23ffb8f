"""The pool in a process of its own: Ctrl-C during a call, and the ways to leave while one runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import sys, time
from tests.cpu.test_pool import FakeCall
from runtime import tasks
from runtime.pool import WorkerPool

pool = WorkerPool({threads}, driver_works={driver_works})
probe = FakeCall(1, 4, 1, spin=1_000_000)
probe.run(pool)
one = probe.run(pool)
slow = FakeCall(1, 4, 1, spin=int(1_000_000 * {seconds} / one))  # {seconds} s
"""
INTERRUPTED = """
try:
    pool.start(slow.call)
    print("running", flush=True)
    pool.wait()
except KeyboardInterrupt:
    late = time.monotonic_ns() - pool._words[tasks.FINISHED_AT // 8]
    assert (slow.counts == 1).all(), "the call was cut short"
    assert late < 500_000_000, f"{{late / 1e9:.2f}} s after the call ended"
    assert FakeCall(2, 2, 2).run(pool) >= 0, "the pool is not usable"
    print("interrupted")
"""
LEAVINGS = {
    "the end of the script": "pool.start(slow.call)",
    "sys.exit": "pool.start(slow.call); sys.exit(0)",
    "workers asleep": "time.sleep(0.05)",
    "close while a call runs": "pool.start(slow.call); pool.close()",
    "a dropped pool": "pool.start(slow.call); del pool",
}
POOLS = [
    pytest.param({"threads": 1, "driver_works": True}, id="the driver alone"),
    pytest.param({"threads": 1, "driver_works": False}, id="a worker alone"),
    pytest.param({"threads": None, "driver_works": True}, id="all cores"),
]


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kind", POOLS)
def test_ctrl_c_counts_when_the_call_has_ended(kind: dict[str, object]) -> None:
    process = start(HEAD.format(seconds=1.5, **kind) + INTERRUPTED.format())
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.3)  # it is in the call now
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (0, "interrupted\n", "")


@pytest.mark.parametrize("leaving", LEAVINGS.values(), ids=LEAVINGS)
def test_leaving_does_not_hang(leaving: str) -> None:
    process = start(HEAD.format(seconds=0.2, threads=None, driver_works=True) + leaving)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
