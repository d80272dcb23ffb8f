"""Keys and values in main memory beside the cuda device, in Triton's interpreter where there is no
GPU: text and log-probabilities are those of a cache on the GPU."""

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
from ..runners import CudaOptions, cuda_runner

LONG = [(7 * i + i * i) % 61 + 1 for i in range(70)]
"""More than a page."""
PROMPTS = [LONG, [5, 17, 60, 33, 8], [*LONG[:66], 9, 4]]


@pytest.mark.parametrize(
    ("family", "kv_dtype", "options"),
    [
        ("qwen3_moe", "bf16", CudaOptions("cpu")),
        ("deepseek_v3", "fp8", CudaOptions("gpu")),
        pytest.param("deepseek_v3", "bf16", CudaOptions("gpu"), marks=pytest.mark.all),
        pytest.param("qwen3_moe", "fp8", CudaOptions("gpu"), marks=pytest.mark.all),
        pytest.param(
            "qwen3_moe", "bf16", CudaOptions("cpu", dual_batch=True), marks=pytest.mark.all
        ),
        pytest.param(
            "qwen3_moe", "bf16", CudaOptions("cpu", prefill="stream"), marks=pytest.mark.all
        ),
    ],
)
def test_text_and_logprobs_are_those_of_a_cache_on_the_gpu(
    family: str, kv_dtype: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    """Prompts in chunks, two of which begin alike, and decode steps; three of four layers take the
    two staging buffers in turns."""
    tiny.make(tmp_path, family, num_hidden_layers=4)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    params = SamplingParams(temperature=0, seed=1, max_tokens=3, ignore_eos=True, logprobs=1)
    found = []
    with WorkerPool(1, driver_works=False) as pool:
        config = read_config(tmp_path)
        with open_weights(tmp_path, config, kv_dtype=kv_dtype) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        for kv_in_main in ((), (0, 2, 3)):
            few = replace(options, decode_buckets=(4,), kv_in_main=kv_in_main)
            runner = cuda_runner(decoder, where, pool, 128, 6, 40, 3, "generic", options=few)
            runner.load()
            with Engine(runner) as engine:
                found.append(
                    [*engine.generate(PROMPTS, params), *engine.generate(PROMPTS[:1], params)]
                )
            places = {n: cache.device.type for n, cache in runner.caches.items()}
            runner.close()
    loads = [n for n in runner.decode_steps[0].program.nodes if n.op == "load_pages"]
    assert len({n.series("staging") for n in loads}) == 2 < len(loads)
    if device.type == "cuda":
        assert set(places.values()) == {"cpu", "cuda"}
    for a, b in zip(*found, strict=True):
        assert a.token_ids == b.token_ids
        assert a.completions[0].logprobs == b.completions[0].logprobs
