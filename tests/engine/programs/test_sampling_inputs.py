"""Parameters of sampling as inputs of a program: every device reads the same columns and tables,
and counts what it draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program.weights import WeightStore
from runtime.runner.sampling import SamplingBatch
from runtime.workers.pool import WorkerPool

from .sampling_rows import V, check, program, rows

R = len(rows())


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_a_device_draws_what_the_rows_ask_for(device: str) -> None:
    batch: Any = SimpleNamespace(seeds=np.zeros(R, np.int64), draws=np.zeros(R, np.int64))
    columns = SamplingBatch(batch, V, R, torch.device("cpu"))
    logits = torch.zeros(R, V)
    inputs = {"logits": logits} | columns.tensors()
    with WorkerPool(1) as pool:
        step = (
            CpuExecutable(program(R), WeightStore(), pool, inputs, {})
            if device == "cpu"
            else RefExecutable(Compiled.of(on_ref(program(R))), WeightStore(), inputs, {})
        )

        def run(given: torch.Tensor) -> dict[str, torch.Tensor]:
            logits[: len(given)] = given
            step.sizes[:] = len(given)
            step.run()
            return step.outputs

        check(batch, columns, run)


def test_penalties_of_a_sequence_that_went_on_elsewhere() -> None:
    """It was preempted: the next step that has it is not the one after the last that had it."""
    batch: Any = SimpleNamespace(seeds=np.zeros(R, np.int64), draws=np.full(R, 3))
    columns = SamplingBatch(batch, V, R, torch.device("cpu"))
    penalized = rows()[2]
    assert penalized.counts is not None
    columns.arrange([penalized])
    columns.refresh()
    columns.write_masks()
    for token in (40, 41):
        penalized.counts.add(token)
        batch.draws[0] += 1
    columns.arrange([penalized])
    seen = columns.seen[int(columns.columns["seen_row"][0])]
    found = {token: int(seen[token]) >> 1 for token in seen.nonzero().flatten().tolist()}
    assert found == {3: 0, 5: 2, 8: 0, 9: 1, 40: 1, 41: 1}
