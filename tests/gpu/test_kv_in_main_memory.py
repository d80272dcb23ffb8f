"""Keys and values in main memory beside the cuda device, in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.engine import Engine, Result, SamplingParams
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..model.checks import errors
from ..runners import CudaOptions, cuda_runner

LONG = [(7 * i + i * i) % 61 + 1 for i in range(66)]
"""More than a page."""
PROMPTS = [[*LONG[:64], 9], [5, 17, 60]]
CPU = CudaOptions("cpu")
GPU = CudaOptions("gpu")
EVERY = (0, 1, 2)
BF16 = 0.06
"""Of the norm of a token's logprobs: the GPU's activations are bfloat16."""


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
    """Three layers take two staging buffers in turns."""
    tiny.make(tmp_path, family, num_hidden_layers=3)
    found = [
        generated(kv_dtype, replace(options, kv_in_main=layers), tmp_path, device)
        for layers in ((), EVERY)
    ]
    loads = [node for node in found[1][0] if node.op == "load_pages"]
    assert len({node.series("staging") for node in loads}) == 2 < len(loads)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert a.token_ids == b.token_ids
        assert a.completions[0].logprobs == b.completions[0].logprobs


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", GPU),
        pytest.param("gpt_oss", CPU, marks=pytest.mark.all),
        pytest.param("deepseek_v3", CPU, marks=pytest.mark.all),
    ],
    ids=["norms", "windows and sinks, beside experts", "latents stay on the GPU"],
)
def test_logprobs_are_transformers_where_the_cpu_attends(
    family: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    made = tiny.make(tmp_path, family, num_hidden_layers=3)
    options = replace(options, kv_in_main=EVERY, kv_attention="cpu")
    nodes, results = generated("bf16", options, tmp_path, device)
    attends = {node.device == "cpu" for node in nodes if node.op == "attention"}
    assert attends == {family != "deepseek_v3"}
    found = list[float]()
    for result in results:
        ids = [*result.prompt_ids, *result.token_ids]
        with torch.no_grad():
            truth = made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        written = result.completions[0].logprobs
        for row, one in zip(truth[len(result.prompt_ids) - 1 :], written, strict=False):
            tokens, logprobs = zip(*one.top, strict=True)
            found.append(float(errors(torch.tensor(logprobs), row[list(tokens)])))
    assert median(found) < BF16, "of another expert here and there a token has more"


def generated(
    kv_dtype: str, options: CudaOptions, path: Path, device: torch.device
) -> tuple[Any, list[Result]]:
    """The nodes of a decode step, and what is written behind a prompt in chunks, then behind one
    that begins with a page of it, beside another one."""
    where = "cuda:0" if device.type == "cuda" else "cpu"
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=20)
    options = replace(options, buckets=(4,), decode_buckets=(2,))
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(path, read_config(path), kv_dtype=kv_dtype) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        runner = cuda_runner(decoder, where, pool, 128, 4, 33, 2, "generic", options=options)
        runner.load()
        with Engine(runner) as engine:
            results = [*engine.generate([LONG], params), *engine.generate(PROMPTS, params)]
        if options.kv_in_main:
            assert {cache.device.type for cache in runner.caches.values()} == {"cpu"}
        runner.close()
    assert results[1].completions[0].stats.cached_tokens == 64
    return runner.decode_steps[0].program.nodes, results
