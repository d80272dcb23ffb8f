"""Models whose layers keep a state of each sequence, against the same layers over whole sequences
in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import model
from runtime.engine import Result, SamplingParams

from ..model import tiny
from .recurrent import make_recurrent, recurrent_layers

ERROR = {"ref": 1e-3, "cpu": 0.1}
"""Of log-probabilities: float32, and inputs of matrices, keys and values in bfloat16."""
SIZES: dict[str, Any] = {
    "max_model_len": 448,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 96,
    "max_num_logits": 96,
    "snapshot_tokens": 128,
    "threads": 1,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny.Tiny]:
    path = tmp_path_factory.mktemp("recurrent")
    found = tiny.make(path, "qwen3_moe", max_position_embeddings=448)
    make_recurrent(found.reference).set_attn_implementation("eager")
    with recurrent_layers():
        yield found


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **more)


def check(made: tiny.Tiny, prompt: list[int], result: Result, device: str) -> None:
    """Every output is what the truth draws, but for ties that are nearer than its errors."""
    for output in result.completions:
        ids = [*prompt, *output.token_ids]
        with torch.no_grad():
            logits = made.reference(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1)
        own = torch.tensor([each.logprob for each in output.logprobs])
        drawn = truth.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (own - drawn).abs().median() < ERROR[device] / 4
        assert ((own - drawn).abs() < ERROR[device]).float().mean() > 0.9
        assert (truth.max(-1).values - drawn < 2 * ERROR[device]).float().mean() > 0.9


@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_chunks_and_neighbours_leave_states_alone(device: str, made: tiny.Tiny) -> None:
    prompts = [tokens(n, n) for n in (3, 40, 150, 97)]
    with model.load_engine(made.path, device=device, **SIZES) as llm:
        found = llm.engine.generate(prompts, greedy(12))
    for prompt, result in zip(prompts, found, strict=True):
        check(made, prompt, result, device)
