"""Layers with a window keep what their tokens see, and give the rest back: against transformers'
own model over whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import model
from runtime.engine import Result, SamplingParams

from ..model import tiny

MEDIAN, MOST = {"ref": 1e-4, "cpu": 5e-3}, {"ref": 1e-4, "cpu": 2e-2}
"""Errors of log-probabilities, in nats, where those of unrelated tokens are 0.5: of the median
token, and of nine in ten: a near-tie of experts may move others of the cpu's further. With whole
pages they are the same, bit for bit."""
DEVICES = ["ref", "cpu"]
GAINS = tiny.Gains(layers=0.7, head=0.5, router=0.5, choice=0.1)
LENGTH = 640
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {},
    "gpt_oss": {},
    "mixtral": {"sliding_window": 100},  # of all layers
    "qwen3_moe": {"sliding_window": 1, "use_sliding_window": True, "max_window_layers": 1},
}
SIZES: dict[str, Any] = {
    "max_model_len": LENGTH,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 96,
    "max_num_logits": 96,
    "kv_tokens": 64 * 20,
    "threads": 1,
}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    path = tmp_path_factory.mktemp("windows")
    gains = GAINS._replace(embedding=0.02) if request.param == "gemma4_text" else GAINS
    more = FAMILIES[request.param] | {"max_position_embeddings": LENGTH}
    return tiny.make(path, request.param, gains=gains, **more)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **more)


def check(made: tiny.Tiny, prompt: list[int], result: Result, device: str) -> None:
    """Every output has the log-probabilities that transformers gives its tokens."""
    for output in result.completions:
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = made.reference(ids).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        error = (torch.tensor([each.logprob for each in output.logprobs]) - truth).abs()
        assert error.median() < MEDIAN[device] and error.quantile(0.9) < MOST[device]


@pytest.mark.parametrize("device", DEVICES)
def test_nobody_misses_what_lies_behind_a_window(device: str, made: tiny.Tiny) -> None:
    """Prompts in chunks, beside each other, preempted, forked, and taken up again."""
    with model.load_engine(made.path, device=device, **SIZES, draft="off") as llm:
        runner = llm.runner
        assert runner.window == made.reference.config.sliding_window
        pages = {runner.caches[name].shape[0] for name in runner.model.caches(1)}
        assert min(pages) == runner.window_pages < runner.num_pages == 20
        prompts = [tokens(n, n) for n in (300, 310, 318)]
        found = llm.engine.generate(prompts, greedy(100))
        for prompt, result in zip(prompts, found, strict=True):
            check(made, prompt, result, device)
        assert llm.engine.stats.preemptions > 0
        forked = tokens(300, 1)
        (result,) = llm.engine.generate([forked], greedy(70, n=2))
        assert [c.stats.cached_tokens for c in result.completions] == [0, 256]
        check(made, forked, result, device)
        turn = [*forked, *result.completions[0].token_ids, *tokens(20, 2)]
        (result,) = llm.engine.generate([turn], greedy(8))
        assert result.completions[0].stats.cached_tokens == 320
        check(made, turn, result, device)
