"""What is said of predictions beside committed runs: which of two ways is faster, and on a machine
of which roofs alone are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.papers.compared import Compared
from bench.papers.moved import moved
from bench.papers.ranking import TEN, ranked, ten
from bench.papers.rows import Row
from model.planner.machines import find_machine
from runtime.devices.sim.routing import Routing

BESIDE = Row(
    *("h200-16-cores", "a file", "2026-11-28", "decode", "qwen3-30b", "q4_k", 24, 32000, 16),
    *("cuda:0", "cpu", 0, 1, 0, 1, 512, 5000.0),
)


def compared(row: Row, predicted: float) -> Compared:
    return Compared(row, predicted, "main memory", Routing())


@pytest.mark.parametrize(("predicted", "right"), [(4500.0, 1), (5500.0, 0)])
def test_a_choice_is_right_as_it_is_predicted(predicted: float, right: int) -> None:
    deferring = replace(BESIDE, deferred=1, measured=4600.0)
    found = [compared(BESIDE, 5200.0), compared(deferring, predicted)]
    (only,) = ten(found)
    assert only.choice is TEN[2] and only.right == bool(right)
    assert only.measured == pytest.approx(5000 / 4600)
    assert ranked(found) == (right, 1)
    near = replace(BESIDE, deferred=1, measured=4900.0)  # by 2 %
    assert ranked([found[0], compared(near, 4500.0)]) == (0, 0)


def test_a_moved_machine_has_its_own_roofs_alone() -> None:
    known, there = find_machine("h200-16-cores"), find_machine("h200-x2-32-cores")
    found = moved("h200-16-cores", "h200-x2-32-cores")
    assert (found.cpu.cores, found.cpu.read_gbps) == (32, there.cpu.read_gbps)
    assert found.cpu.kernels["q4_k"].tflops == 2 * known.cpu.kernels["q4_k"].tflops
    assert found.cpu.experts_share == known.cpu.experts_share and found.engine == known.engine
    assert moved("xeon-amx-2-cores", "h200-16-cores").gpu is None
    gpu = moved("h200-16-cores", "h100-16-cores").gpu
    assert gpu is not None and known.gpu is not None and gpu.hop_us == known.gpu.hop_us
    assert gpu.read_gbps / known.gpu.read_gbps == pytest.approx(3350 / 4578)  # as published
