"""Prompts that are streamed to other GPUs than the one that decodes, in Triton's interpreter where
there are none: the tokens are those of one GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from runtime.engine import Engine, SamplingParams
from runtime.runner.batch import Route
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import CudaOptions, cuda_runner

FIRST = [list(range(3, 70)), [7, 9, 11]]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize(
    ("family", "gpus", "route", "count"),
    [
        ("qwen3_moe", "dslp", Route.DSLP, 2),
        ("deepseek_v3", "dslp", Route.DSLP, 3),
        ("qwen3_moe", "disaggregated", Route.DISAGGREGATED, 2),
        pytest.param("deepseek_v3", "disaggregated", Route.DISAGGREGATED, 2, marks=pytest.mark.all),
        ("qwen3_moe", "tensor", Route.CHUNKED, 2),
        pytest.param("deepseek_v3", "tensor", Route.CHUNKED, 2, marks=pytest.mark.all),
    ],
)
def test_routes_draw_what_one_gpu_draws(
    family: str, gpus: str, route: str, count: int, tmp_path: Path, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"there are fewer than {count} GPUs")
    tiny.make(tmp_path, family, num_hidden_layers=2)
    every = [f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(count)]
    options = CudaOptions("cpu", prefill="stream", decode_buckets=(2,))
    if gpus == "tensor":
        options = CudaOptions("gpu", buckets=(48,), decode_buckets=(2,))
    found = []
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        for names, way in ((every[:1], "auto"), (every, gpus)):
            sizes = 192, None, 48, 2, "generic"  # the first prompt has two chunks
            own = replace(options, gpus=way)
            runner = cuda_runner(decoder, ",".join(names), pool, *sizes, options=own)
            runner.load()
            with Engine(runner) as engine:
                turns = [engine.generate(FIRST, [PARAMS] * 2)]
                # The second turn reads its prompt's pages, and those that the first one decoded.
                said = (found or [turns[0]])[0][0]
                more = [FIRST[0] + list(said.token_ids) + [5, 4, 3, 2, 1], FIRST[1]]
                turns.append(engine.generate(more, [PARAMS] * 2))
                routes = engine.stats.prompt_steps
            found.append(sum(turns, []))
            runner.close()
    assert routes[route] >= 3
    errors = list[float]()
    for a, b in zip(*found, strict=True):
        for x, y in zip(a.completions[0].logprobs, b.completions[0].logprobs, strict=True):
            errors.append(abs(dict(x.top)[x.token] - dict(y.top).get(x.token, 0)))
            if x.top[0][1] - x.top[1][1] < 0.05:  # a near-tie, which rounding may turn
                break
            assert x.token == y.token
    assert len(errors) >= 6
    # Sums of experts are rounded to bfloat16 on each GPU.
    assert np.median(errors) < 0.004 and max(errors) < 0.02
