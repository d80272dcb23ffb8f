"""Rows that ask for all that sampling can do, and what a device must draw for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pykernels.ref.sampling import SamplingRequest, sample_requests
from runtime.program import Builder, Program
from runtime.program.step_inputs import lower_sampling
from runtime.runner.batch import SequenceSampling
from runtime.runner.counts import TokenCounts
from runtime.runner.sampling import SamplingBatch
from runtime.runner.sampling_params import SamplingParams

V = 300
WORDS = -(-V // 32)


def program(R: int) -> Program:
    """Sampling alone, of up to R sequences."""
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
            SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, logprobs=5),
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


def check(
    batch: Any,
    inputs: SamplingBatch,
    run: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
) -> None:
    """Steps of a device draw what the definition draws, which goes by what the engine has counted:
    in a batch that goes on, whose rows change their places, and from which one leaves.

    Args:
        batch: ``seeds`` and ``draws``, which the inputs read.
        run: a step of the device, from its logits to its outputs.
    """
    sampling = rows()
    for draws in range(3, 15):
        if draws in (3, 7, 11):
            sampling.reverse()
            sampling = sampling[: 5 if draws < 11 else 4]
            batch.seeds[: len(sampling)] = [row.seed for row in sampling]
            batch.draws[: len(sampling)] = draws
            inputs.arrange(sampling)
        batch.draws[: len(sampling)] = draws
        for row in sampling:
            if row.mask is not None:
                allow(row.mask, [draws, 2 * draws, V - draws])
        inputs.refresh()
        inputs.write_masks()
        generator = torch.Generator().manual_seed(draws)
        logits = 3 * torch.randn(len(sampling), V, generator=generator)
        truth = sample_requests(logits, [request(row, draws) for row in sampling])
        found = {name: tensor[: len(sampling)] for name, tensor in run(logits).items()}
        assert torch.equal(found["sampled_token_ids"], truth.tokens)
        assert torch.equal(found["top_ids"], truth.top_ids)
        for name in ("logprobs", "top_logprobs"):
            ours, theirs = found[name], getattr(truth, name)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, equal_nan=True)
        for row, token in zip(sampling, truth.tokens.tolist(), strict=True):
            if row.counts is not None:
                row.counts.add(token)
