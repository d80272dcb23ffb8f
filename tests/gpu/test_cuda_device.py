"""A small model whole on the cuda device, in Triton's interpreter where there is no GPU: the truth
is transformers' own model. ``tests/model/loading/test_cuda_engine.py`` has every family on a
GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.devices.cuda.runner import CudaRunner
from runtime.engine import Engine, SamplingParams
from runtime.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny

BF16 = 0.06
"""Of the norm of a token's logprobs: activations are bfloat16."""


@pytest.mark.parametrize(("family", "experts"), [("deepseek_v3", "cpu"), ("qwen3_moe", "gpu")])
def test_logprobs_are_transformers(
    family: str, experts: str, tmp_path: Path, device: torch.device
) -> None:
    made = tiny.make(tmp_path, family, num_hidden_layers=2)
    ids = [5, 17, 60, 33, 8, 90]
    with torch.no_grad():
        truth = made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.decoder(packer(pool), lambda *_: None)
        runner = CudaRunner(
            decoder, where, pool, 64, None, 4, 2, "generic", max_num_logits=4, experts=experts
        )
        with Engine(runner) as engine:
            params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, logprob_start=1)
            [result] = engine.generate([ids], params)
    errors = []
    for row, one in zip(truth, result.completions[0].prompt_logprobs, strict=False):
        tokens, logprobs = zip(*one.top, strict=True)
        expected = row[list(tokens)]
        errors.append(float((torch.tensor(logprobs) - expected).norm() / expected.norm()))
    assert len(errors) == len(ids) - 1 and sorted(errors)[len(errors) // 2] < BF16
