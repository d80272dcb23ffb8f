"""Parameters of sampling as inputs of a program: every device reads the same columns and tables,
and counts what it draws."""

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
from runtime.step_inputs import lower_sampling
from runtime.workers.pool import WorkerPool

R, V, TOP = 5, 300, 5
WORDS = -(-V // 32)


def program() -> Program:
    b = Builder("sampling", {"T": R, "S": R, "R": R})
    b.buffer("logits", "R", V, kind="input")
    lower_sampling(b, "logits", V)
    return b.build()


def rows() -> list[SequenceSampling]:
    """Greedy; warm with limits; with penalties; with a bias; with a mask."""
    counts = TokenCounts([3, 5, 5, 8], 30, V)
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
        SequenceSampling(SamplingParams(temperature=1.0), 5, None, {}, np.zeros(WORDS, np.int32)),
    ]


def allow(mask: np.ndarray, tokens: list[int]) -> None:
    """Sets the bits of a mask."""
    mask.view(np.uint8)[:] = np.packbits(
        np.isin(np.arange(32 * len(mask)), tokens), bitorder="little"
    )


def request(row: SequenceSampling, draws: int) -> SamplingRequest:
    p, counts = row.params, row.counts
    seen: dict[str, Any] = {}
    if counts is not None:
        seen = {
            "seen": torch.from_numpy(counts.ids[: counts.size]),
            "counts": torch.from_numpy(counts.counts[: counts.size]),
        }
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")
        seen["mask"] = torch.from_numpy(bits[:V]).bool()
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


def test_devices_draw_what_the_rows_ask_for() -> None:
    """On each device a batch goes on for ten steps, and then its rows change their places: what
    penalties go by is counted where it is drawn, and the definition is told by the engine."""
    made = program()
    logits = torch.zeros(R, V)
    with WorkerPool(1) as pool:
        for device in ("cpu", "ref"):
            sampling = rows()
            batch: Any = SimpleNamespace(seeds=np.zeros(R, np.int64), draws=np.zeros(R, np.int64))
            columns = SamplingInputs(batch, V, R, torch.device("cpu"))
            inputs = {"logits": logits} | columns.tensors()
            step = (
                CpuExecutable(made, pool, inputs, {})
                if device == "cpu"
                else RefExecutable(on_ref(made), inputs, {})
            )
            step.sizes[:] = R
            for draws in range(3, 20):
                batch.draws[:] = draws
                if draws in (3, 12):
                    sampling.reverse()
                    batch.seeds[:] = [row.seed for row in sampling]
                    columns.arrange(sampling)
                for row in sampling:
                    if row.mask is not None:
                        allow(row.mask, [draws, 2 * draws, V - draws])
                columns.refresh()
                logits.normal_(generator=torch.Generator().manual_seed(draws)).mul_(3)
                truth = sample_requests(logits, [request(row, draws) for row in sampling])
                step.run()
                assert torch.equal(step.outputs["sampled_token_ids"], truth.tokens)
                assert torch.equal(step.outputs["top_ids"], truth.top_ids)
                near = torch.isclose(
                    step.outputs["logprobs"], truth.logprobs, atol=1e-5, equal_nan=True
                )
                assert near.all()
                for row, token in zip(sampling, truth.tokens.tolist(), strict=True):
                    if row.counts is not None:
                        row.counts.add(token)


def test_penalties_of_a_sequence_that_went_on_elsewhere() -> None:
    """It was preempted: the next step that has it is not the one after the last that had it."""
    batch: Any = SimpleNamespace(seeds=np.zeros(R, np.int64), draws=np.full(R, 3))
    columns = SamplingInputs(batch, V, R, torch.device("cpu"))
    penalized = rows()[2]
    assert penalized.counts is not None
    columns.arrange([penalized])
    columns.refresh()
    for token in (40, 41):
        penalized.counts.add(token)
        batch.draws[0] += 1
    columns.arrange([penalized])
    seen = columns.seen[int(columns.columns["seen_row"][0])]
    found = {token: int(seen[token]) >> 1 for token in seen.nonzero().flatten().tolist()}
    assert found == {3: 0, 5: 2, 8: 0, 9: 1, 40: 1, 41: 1}
