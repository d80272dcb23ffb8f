"""Prompts that several GPUs share, or that another one reads than the one that decodes, in Triton's
interpreter where there are none: the truth is transformers' own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.engine import Engine, Result, SamplingParams
from runtime.runner.route import Route
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..model.checks import errors
from ..runners import CudaOptions, cuda_runner

FIRST = [list(range(3, 70)), [7, 9, 11]]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
SIZES = 192, None, 48, 2, "generic"  # the first prompt has two chunks


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.all)])
@pytest.mark.parametrize(
    ("family", "gpus", "route"),
    [
        ("qwen3_moe", "dslp", Route.DSLP),
        ("deepseek_v3", "dslp", Route.DSLP),
        ("qwen3_moe", "disaggregated", Route.DISAGGREGATED),
        pytest.param("deepseek_v3", "disaggregated", Route.DISAGGREGATED, marks=pytest.mark.all),
        ("qwen3_moe", "tensor", Route.CHUNKED),
        pytest.param("deepseek_v3", "tensor", Route.CHUNKED, marks=pytest.mark.all),
    ],
)
def test_logprobs_are_transformers(
    family: str, gpus: str, route: str, count: int, tmp_path: Path, device: torch.device
) -> None:
    _check_logprobs(family, gpus, route, count, tmp_path, device)


def test_a_gpu_may_have_fewer_experts(tmp_path: Path, device: torch.device) -> None:
    """A GPU behind a narrow link has a smaller share of the experts."""
    _check_logprobs("qwen3_moe", "dslp", Route.DSLP, 2, tmp_path, device, "5,1")


def _check_logprobs(
    family: str,
    gpus: str,
    route: str,
    count: int,
    tmp_path: Path,
    device: torch.device,
    shares: str = "auto",
) -> None:
    """Of a second turn, too, which reads pages that the prompt's GPUs, and that decode steps have
    written."""
    if device.type == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"there are fewer than {count} GPUs")
    made = tiny.make(tmp_path, family, num_hidden_layers=2)
    options = CudaOptions("gpu", buckets=(48,), decode_buckets=(2,), gpus=gpus)
    if gpus != "tensor":
        options = CudaOptions(
            "cpu", prefill="stream", decode_buckets=(2,), gpus=gpus, gpu_shares=shares
        )
    names = ",".join(f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(count))
    found = list[tuple[torch.Tensor, torch.Tensor]]()
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        runner = cuda_runner(decoder, names, pool, *SIZES, options=options)
        runner.load()
        with Engine(runner) as engine:
            prompts = FIRST
            for _ in range(2):
                results = engine.generate(prompts, [PARAMS] * 2)
                said = [list(result.token_ids) for result in results]
                for prompt, result in zip(prompts, results, strict=True):
                    found += rows(made, prompt, result)
                prompts = [prompt + own + [5, 4] for prompt, own in zip(prompts, said, strict=True)]
            assert engine.stats.prompt_steps[route] >= 3
        runner.close()
    wrong = torch.stack([errors(got, want) for got, want in found])
    assert len(wrong) == 12
    assert wrong.median() < 0.01 and wrong.max() < 0.1, wrong  # activations are bfloat16


def rows(
    made: tiny.Tiny, prompt: list[int], result: Result
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logprobs of the likeliest tokens behind a prompt, as drawn and by transformers."""
    every = torch.tensor([prompt + list(result.token_ids)])
    with torch.no_grad():
        truth = made.reference(every).logits[0].float().log_softmax(-1)[len(prompt) - 1 :]
    pairs = []
    for want, one in zip(truth, result.completions[0].logprobs, strict=False):
        tokens, logprobs = zip(*one.top, strict=True)
        pairs.append((torch.tensor(logprobs), want[list(tokens)]))
    return pairs
