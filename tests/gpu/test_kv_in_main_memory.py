"""Keys and values in main memory beside the cuda device, in Triton's interpreter where there is no
GPU: text and log-probabilities are those of a cache on the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.engine import Engine, Result, SamplingParams
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import CudaOptions, cuda_runner

LONG = [(7 * i + i * i) % 61 + 1 for i in range(66)]
"""More than a page."""
PROMPTS = [[*LONG[:64], 9], [5, 17, 60]]
CPU = CudaOptions("cpu")
GPU = CudaOptions("gpu")
BF16 = 0.02
"""Of a log-probability, where the CPU attends in float32."""


@pytest.mark.parametrize(
    ("family", "kv_dtype", "options"),
    [
        ("qwen3_moe", "bf16", CPU),
        ("deepseek_v3", "fp8", GPU),
        pytest.param("deepseek_v3", "bf16", GPU, marks=pytest.mark.all),
        pytest.param("qwen3_moe", "fp8", GPU, marks=pytest.mark.all),
        pytest.param("gpt_oss", "bf16", GPU, marks=pytest.mark.all),
        pytest.param("qwen3_moe", "bf16", replace(CPU, dual_batch=True), marks=pytest.mark.all),
        pytest.param("qwen3_moe", "bf16", replace(CPU, prefill="stream"), marks=pytest.mark.all),
    ],
    ids=["gqa", "mla, fp8", "mla", "gqa, fp8", "windows", "two microbatches", "streamed prompts"],
)
def test_text_and_logprobs_are_those_of_a_cache_on_the_gpu(
    family: str, kv_dtype: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    """A prompt in chunks, then one that begins with a page of it beside another one; three layers
    take two staging buffers in turns."""
    runner, found = generated(family, kv_dtype, options, tmp_path, device)
    loads = [n for n in runner.decode_steps[0].program.nodes if n.op == "load_pages"]
    assert len({n.series("staging") for n in loads}) == 2 < len(loads)
    for a, b in zip(*found, strict=True):
        assert a.token_ids == b.token_ids
        assert a.completions[0].logprobs == b.completions[0].logprobs


@pytest.mark.parametrize(
    ("family", "kv_dtype", "options"),
    [
        ("qwen3_moe", "bf16", GPU),
        pytest.param("gpt_oss", "bf16", CPU, marks=pytest.mark.all),
        pytest.param("qwen3_moe", "fp8", replace(CPU, deferred=1), marks=pytest.mark.all),
    ],
    ids=["norms", "windows and sinks", "fp8 beside experts"],
)
def test_the_cpu_may_attend_in_decode_steps(
    family: str, kv_dtype: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    options = replace(options, kv_attention="cpu")
    runner, found = generated(family, kv_dtype, options, tmp_path, device)
    attends = [n for n in runner.decode_steps[0].program.nodes if n.op == "attention"]
    assert {n.device for n in attends} == {"cpu"}
    for a, b in zip(*found, strict=True):
        assert a.token_ids == b.token_ids
        pairs = zip(a.completions[0].logprobs, b.completions[0].logprobs, strict=True)
        assert max(abs(x.logprob - y.logprob) for x, y in pairs) < BF16


def generated(
    family: str, kv_dtype: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> tuple[Any, list[list[Result]]]:
    """The last runner; what is written with all caches on the GPU, and in main memory."""
    tiny.make(tmp_path, family, num_hidden_layers=3)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    found = []
    with WorkerPool(1, driver_works=False) as pool:
        config = read_config(tmp_path)
        with open_weights(tmp_path, config, kv_dtype=kv_dtype) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        for kv_in_main in ((), (0, 1, 2)):
            few = replace(options, buckets=(4,), decode_buckets=(2,), kv_in_main=kv_in_main)
            runner = cuda_runner(decoder, where, pool, 128, 4, 33, 2, "generic", options=few)
            runner.load()
            with Engine(runner) as engine:
                first = engine.generate([LONG], params)
                found.append([*first, *engine.generate(PROMPTS, params)])
            if kv_in_main:
                assert {cache.device.type for cache in runner.caches.values()} == {"cpu"}
            runner.close()
    assert found[1][1].completions[0].stats.cached_tokens == 64
    return runner, found
