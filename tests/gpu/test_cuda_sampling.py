"""Sampling as a launch of the cuda device; parameters and results in the step's pinned blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pykernels.ref.sampling import MAX_LOGPROBS
from runtime.devices.cuda.binders.sampling import sample_requests
from runtime.devices.cuda.memory.buffers import Arena, GpuBuffers, StepOutputs
from runtime.devices.cuda.step.inputs import Bucket, StepInputs
from runtime.program.weights import WeightStore
from runtime.runner.sampling import SamplingBatch

from ..engine.programs.sampling_rows import V, check, program

R = 6


def test_the_launch_draws_what_the_rows_ask_for(device: torch.device) -> None:
    """The bucket has a row more than the batch, and its logits are whatever was there."""
    made = program(R)
    batch: Any = SimpleNamespace(seeds=np.zeros(R, np.int64), draws=np.zeros(R, np.int64))
    columns = SamplingBatch(batch, V, R, device)
    names = ("tokens", "positions", "is_prompt", "slot_mapping", "lengths", "page_rows")
    names += ("logits_indices",)
    arrays = {name: torch.zeros(R, dtype=torch.int64) for name in names}
    arrays["page_table"] = torch.zeros(R, 1, dtype=torch.int64)
    inputs = Bucket(StepInputs(arrays, columns, {"cuda": device}), made)
    logits = torch.full((R, V), float("nan"), device=device)
    results = StepOutputs(
        {
            "sampled_token_ids": ((R,), torch.int64),
            "logprobs": ((R,), torch.float32),
            "top_ids": ((R, MAX_LOGPROBS), torch.int64),
            "top_logprobs": ((R, MAX_LOGPROBS), torch.float32),
        },
        device,
    ).of({})
    given = {**inputs.on["cuda"], "logits": logits}
    read = device, given, {}, results.tensors, Arena(device)
    launch = sample_requests(GpuBuffers(made, WeightStore(), *read), made.nodes[0])

    def run(step: torch.Tensor) -> dict[str, torch.Tensor]:
        n = len(step)
        logits[:n] = step.to(device)
        inputs.send(n, n, n)
        launch()
        results.receive()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        assert torch.equal(
            results.tensors["sampled_token_ids"].cpu(), results.host["sampled_token_ids"]
        )
        return results.host

    check(batch, columns, run)
