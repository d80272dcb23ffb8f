"""Which experts each token used with GPUs, in Triton's interpreter where there is none: against
transformers' own routers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.engine import Engine, SamplingParams
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..model.routers import check_routed, of_transformers
from ..runners import CudaOptions, cuda_runner

PROMPTS = [[5, 17, 60, 33, 8, 90], [7, 41, 2], [11]]


@pytest.mark.parametrize(
    ("gpus", "family", "options"),
    [
        (1, "qwen3_moe", CudaOptions("cpu", prefill="stream", slots={0: 3, 1: 2})),
        (2, "deepseek_v3", CudaOptions("cpu", dual_batch=True)),
        pytest.param(2, "deepseek_v3", CudaOptions("gpu"), marks=pytest.mark.all),
        pytest.param(1, "qwen3_moe", CudaOptions("gpu"), marks=pytest.mark.all),
        pytest.param(1, "qwen3_moe", CudaOptions("cpu", prefill="split"), marks=pytest.mark.all),
    ],
    ids=[
        "a cache, streamed prompts",
        "two GPUs, two microbatches",
        "two GPUs",
        "on the GPU",
        "split",
    ],
)
def test_experts_are_those_of_transformers(
    gpus: int, family: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < gpus:
        pytest.skip(f"there are fewer than {gpus} GPUs")
    made = tiny.make(tmp_path, family, num_hidden_layers=2 + (family == "deepseek_v3"))
    names = ",".join(f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(gpus))
    threads = 2 if device.type == "cuda" else 1
    with WorkerPool(threads, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            # Streamed steps beside others are two kernels at once, which only a GPU can run.
            pages = 2 if options.prefill == "stream" and device.type == "cpu" else 4
            sizes = 64, pages, 4, 3, "generic"
            few = replace(options, decode_buckets=(4,))
            runner = cuda_runner(decoder, names, pool, *sizes, options=few)
            runner.load()
        with Engine(runner) as engine:
            params = SamplingParams(
                temperature=0, max_tokens=3, ignore_eos=True, routed_experts=True
            )
            results = engine.generate(PROMPTS, params)
        layers = [layer.layer for layer in runner.routed_layers]
        runner.close()
    truths = [of_transformers(made.reference, [*r.prompt_ids, *r.token_ids]) for r in results]
    assert {truth.shape[1] for truth in truths} == {len(layers)}
    check_routed(zip([r.completions[0] for r in results], truths, strict=True))
