"""`pykernels bench drafts`: each step checks as many drafts as its row says."""

from __future__ import annotations

import model
from bench.drafts.run import rows
from bench.e2e.ours import Ours
from model.planner.machines import find_machine
from runtime.planning.config import ExecutionConfig


def test_each_row_checks_its_drafts() -> None:
    execution = ExecutionConfig()
    ours = Ours.checkpoint(model.EMBEDDED, execution)
    try:
        there = find_machine("zen2-2-cores")
        found = list(rows(ours, execution, there, most=3, context=32, steps=4, rounds=2))
    finally:
        ours.close()
    assert [row["checked"] for row in found] == [0, 1, 2, 3]
    predicted = [row["predicted"] for row in found]
    assert predicted[0] == 1 and predicted == sorted(predicted)
