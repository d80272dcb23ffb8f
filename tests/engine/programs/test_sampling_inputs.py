"""Parameters of sampling as inputs of a program: both devices read the same columns and lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pykernels.ref.sampling import SamplingRequest, sample_requests
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.runner import on_ref
from runtime.devices.ref.step import RefExecutable
from runtime.devices.sampling import SamplingInputs
from runtime.engine.batch import SequenceSampling
from runtime.engine.counts import TokenCounts
from runtime.engine.sampling_params import SamplingParams
from runtime.program import Builder, Program
from runtime.step_inputs import allocate_inputs, lower_sampling
from runtime.weights import WeightStore
from runtime.workers.pool import WorkerPool

R, V, TOP = 4, 300, 5


def program() -> Program:
    b = Builder("sampling", {"T": R, "S": R, "R": R})
    b.buffer("logits", "R", V, kind="input")
    lower_sampling(b, "logits")
    return b.build()


def rows() -> list[SequenceSampling]:
    """Greedy; warm with limits; with penalties; with a bias."""
    counts = TokenCounts([3, 5, 5, 8], 10, V)
    for token in (5, 5, 9):
        counts.add(token)
    penalties = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logprobs=2,
    )
    return [
        SequenceSampling(SamplingParams(temperature=0), 1, None, {}),
        SequenceSampling(
            SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, logprobs=TOP),
            2,
            None,
            {},
        ),
        SequenceSampling(penalties, 3, counts, {}),
        SequenceSampling(SamplingParams(temperature=1.0), 4, None, {7: 30.0, 11: 29.5}),
    ]


def request(row: SequenceSampling, draws: int) -> SamplingRequest:
    p, counts = row.params, row.counts
    seen: dict[str, Any] = {}
    if counts is not None:
        seen = {
            "seen": torch.from_numpy(counts.ids[: counts.size]),
            "counts": torch.from_numpy(counts.counts[: counts.size]),
        }
    return SamplingRequest(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition=p.repetition_penalty,
        presence=p.presence_penalty,
        frequency=p.frequency_penalty,
        bias_ids=torch.from_numpy(row.bias_ids),
        bias=torch.from_numpy(row.bias_values),
        seed=row.seed,
        draws=draws,
        logprobs=-1 if p.logprobs is None else p.logprobs,
        **seen,
    )


def test_both_devices_draw_what_the_rows_ask_for() -> None:
    made, sampling = program(), rows()
    batch: Any = SimpleNamespace(
        seeds=np.array([row.seed for row in sampling]), draws=np.zeros(R, np.int64)
    )
    columns = SamplingInputs(batch)
    columns.arrange(sampling)
    columns.refresh()
    logits = torch.zeros(R, V)
    inputs = {"logits": logits} | columns.tensors()
    reference = RefExecutable(on_ref(made), WeightStore(), inputs, {})
    with WorkerPool(1) as pool:
        steps = CpuExecutable(made, WeightStore(), pool, inputs, {}), reference
        for draws in range(20):
            batch.draws[:] = draws
            logits.normal_(generator=torch.Generator().manual_seed(draws)).mul_(3)
            truth = sample_requests(logits, [request(row, draws) for row in sampling])
            for step in steps:
                step.sizes[:] = R
                step.run()
                assert torch.equal(step.outputs["sampled_token_ids"], truth.tokens)
                assert torch.equal(step.outputs["top_ids"], truth.top_ids)
                near = torch.isclose(
                    step.outputs["logprobs"], truth.logprobs, atol=1e-5, equal_nan=True
                )
                assert near.all()


def test_a_mask_is_bits_in_memory() -> None:
    made = program()
    inputs = allocate_inputs(made)  # greedy
    inputs["logits"].copy_(torch.arange(V).float().expand(R, -1))
    mask = np.zeros(-(-V // 8), np.uint8)
    mask[33 // 8] |= 1 << 33 % 8
    inputs["sampling.mask"][1] = mask.ctypes.data
    with WorkerPool(1) as pool:
        for step in (
            CpuExecutable(made, WeightStore(), pool, inputs, {}),
            RefExecutable(on_ref(made), WeightStore(), inputs, {}),
        ):
            step.sizes[:] = R
            step.run()
            assert step.outputs["sampled_token_ids"].tolist() == [V - 1, 33, V - 1, V - 1]
