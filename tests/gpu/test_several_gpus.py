"""Layers dealt over several GPUs, in Triton's interpreter where there is none: the tokens are those
of one GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from pykernels.errors import PykernelsError
from runtime.devices.gpus import check_device
from runtime.engine import Engine, SamplingParams
from runtime.experts.cache import CachePolicy
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..model import tiny
from ..runners import CudaOptions, cuda_runner, wait_for_slots

PROMPTS = [[5, 17, 60, 33], [7]]


@pytest.mark.parametrize(
    ("gpus", "family", "options"),
    [
        (2, "deepseek_v3", CudaOptions("gpu")),
        (2, "qwen3_moe", CudaOptions("cpu", deferred=1, gpu_experts={0: (2, 5), 1: (1,)})),
        (2, "qwen3_moe", CudaOptions("cpu", slots={0: 2, 1: 3}, policy=CachePolicy(swaps=2))),
        pytest.param(2, "qwen3_moe", CudaOptions("cpu", prefill="stream"), marks=pytest.mark.all),
        pytest.param(3, "deepseek_v3", CudaOptions("cpu", dual_batch=True), marks=pytest.mark.all),
    ],
    ids=[
        "mla",
        "gqa, some experts on both, some deferred",
        "gqa, slots for experts on both",
        "gqa, streamed",
        "mla, two microbatches",
    ],
)
def test_several_gpus_draw_what_one_draws(
    gpus: int,
    family: str,
    options: CudaOptions,
    tmp_path: Path,
    device: torch.device,
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < gpus:
        pytest.skip(f"there are fewer than {gpus} GPUs")
    tiny.make(tmp_path, family, num_hidden_layers=gpus)
    tokens = 6 if options.slots else 2  # a few steps until slots are filled and used
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=tokens, ignore_eos=True, logprobs=1)
        for t in (0, 0.8)
    ]
    every = [f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(gpus)]
    found = []
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        for names in (every[:1], every):
            sizes = 64, None, 4, 2, "generic"
            few = replace(options, decode_buckets=(1,))
            runner = cuda_runner(decoder, ",".join(names), pool, *sizes, options=few)
            runner.load()
            wait_for_slots(runner)
            with Engine(runner) as engine:
                found.append(engine.generate(PROMPTS, params))
            runner.close()
    nodes = runner.compiled().program.nodes
    layers = [{node.device for node in nodes if node.layer == i} - {"cpu"} for i in range(gpus)]
    assert layers == [{gpu} for gpu in runner.gpus]
    if options.slots:
        assert runner.expert_slots.stats.swaps and runner.expert_slots.stats.hits
        slots = {n.device for n in nodes if n.role == "cached"}
        assert slots == set(runner.gpus)
    for a, b in zip(*found, strict=True):
        assert a.token_ids == b.token_ids
        pairs = zip(a.completions[0].logprobs, b.completions[0].logprobs, strict=True)
        assert all(x.logprob == pytest.approx(y.logprob, abs=1e-3) for x, y in pairs)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cuda:0,cuda", "cuda:0 is named twice in 'cuda:0,cuda'"),
        ("cuda:0,cuda:97", "no cuda:(0: torch finds no|97: there)"),
        ("cuda:0,x", "no device 'x'"),
    ],
)
def test_gpus_that_are_not_there(names: str, message: str) -> None:
    with pytest.raises(PykernelsError, match=message):
        check_device(names)
