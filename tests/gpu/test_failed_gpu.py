"""A GPU that fails while the other one waits for it: the step ends with its error."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from runtime.devices.cuda.step.watch import Watch
from runtime.passes.shard.merge import one_shot_sums
from runtime.runner.batch import DeviceLost

from .two_gpus import bound, sums, two_gpus


class _Failed:
    """A part of a step whose GPU has failed."""

    def ready(self) -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class _Waits:
    """One that waits for it."""

    def ready(self) -> bool:
        return False


@pytest.mark.parametrize("one_launch", [False, True])
def test_a_part_that_fails_ends_the_step(one_launch: bool) -> None:
    """Of the other one, too; in Triton's interpreter, where no step spoils the next one."""
    if torch.cuda.is_available():
        pytest.skip("it would spoil the GPU; see the next test")
    gpus = two_gpus()
    made = bound(one_shot_sums(sums(gpus, 3, 16), 16 * one_launch), gpus, 16)
    graph = made.executable.gpus[1].graph
    launches = graph.launches

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore of it")

    graph.launches = (*launches[:3], fail, *launches[4:])
    with pytest.raises(DeviceLost) as lost:
        made.executable.run()
    assert lost.value.cause == "cpu failed: CUDA error: an illegal memory access"
    graph.launches = launches
    made.assert_adds(1, 2, 3)


class _Link:
    """Where they meet; no flag is ever set."""

    passed = 0

    def __init__(self) -> None:
        self.released, self.given_up = threading.Event(), threading.Event()
        self.release, self.give_up = self.released.set, self.given_up.set


def test_whoever_waits_for_a_failed_gpu_is_released() -> None:
    link = _Link()
    with Watch().over([_Waits(), _Failed()], link):
        assert link.released.wait(10)


def test_gpus_that_wait_for_each_other_are_given_up() -> None:
    link = _Link()
    with Watch().over([_Waits(), _Waits()], link, limit_s=0.3):
        assert link.given_up.wait(10) and not link.released.is_set()


def test_a_parked_step_is_not_given_up() -> None:
    link, parked = _Link(), [True]
    with Watch().over([_Waits(), _Waits()], link, 0.3, lambda: parked[0]):
        assert not link.given_up.wait(1)
        parked[0] = False
        assert link.given_up.wait(10)


def test_a_step_whose_end_nobody_awaits_is_given_up() -> None:
    """Whoever has other steps to do asks again and again whether it has ended."""
    gpus = two_gpus()
    made = bound(sums(gpus, 3, 16), gpus, 16)
    executable, end = made.executable, time.monotonic() + 20
    made.assert_adds(1, 2, 3)
    last = executable.gpus[1]
    ops = [node.op for node in last.memory.program.nodes]
    launches = last.graph.launches
    last.graph.launches = (*launches[: ops.index("submit")], *launches[ops.index("submit") + 1 :])
    executable._limit_s = 0.3
    executable.launch()
    while not executable.ready():
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(DeviceLost, match="GPUs have waited for each other in vain"):
        executable.result()


@pytest.mark.gpu
def test_a_gpu_that_fails_in_a_graph_ends_the_step() -> None:
    """In a process of its own, since no later call on that GPU works."""
    two_gpus()
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.fail_in_a_step"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    # GPUs with access to each other's memory all report it, whichever is asked first.
    assert re.search(r"cuda:[01] failed: CUDA error", found.stdout), found.stdout + found.stderr
