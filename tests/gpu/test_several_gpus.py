"""A model whose layers are dealt over two GPUs, in Triton's interpreter where there is none: one
GPU draws the same tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.config import read_config
from model.opened import open_weights
from pykernels.errors import PykernelsError
from runtime.devices.cuda.runner import CudaRunner
from runtime.devices.gpus import check_device
from runtime.engine import Engine, SamplingParams
from runtime.matrix import packer
from runtime.passes import defer
from runtime.workers.pool import WorkerPool

from ..model import tiny

PROMPTS = [[5, 17, 60, 33], [7]]


@pytest.mark.parametrize(
    ("family", "experts", "options"),
    [
        ("deepseek_v3", "gpu", {}),
        (
            "qwen3_moe",
            "cpu",
            {"gpu_experts": {0: (2, 5), 1: (1,)}, "passes": [partial(defer, N=1)]},
        ),
        pytest.param("deepseek_v3", "cpu", {"dual_batch": True}, marks=pytest.mark.all),
        pytest.param("qwen3_moe", "cpu", {"prefill": "stream"}, marks=pytest.mark.all),
    ],
    ids=["mla", "gqa, some experts on both, some deferred", "mla, two lanes", "gqa, streamed"],
)
def test_two_gpus_draw_what_one_draws(
    family: str, experts: str, options: dict[str, Any], tmp_path: Path, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    tiny.make(tmp_path, family, num_hidden_layers=2)
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=2, ignore_eos=True, logprobs=1)
        for t in (0, 0.8)
    ]
    one, two = ("cuda:0", "cuda:0,cuda:1") if device.type == "cuda" else ("cpu", "cpu,cpu")
    found = []
    with WorkerPool(1) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        for names in (one, two):
            sizes = 64, None, 4, 2, "generic"
            runner = CudaRunner(decoder, names, pool, *sizes, experts=experts, **options)
            runner.load()
            runner.decode_buckets = (1,)
            with Engine(runner) as engine:
                found.append(engine.generate(PROMPTS, params))
            runner.close()
    layers = [
        {n.device for n in runner.lowered(1, 1, 1, 1, 1).nodes if n.layer == i} - {"cpu"}
        for i in range(2)
    ]
    assert layers[0] != layers[1] and [len(layer) for layer in layers] == [1, 1]
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
