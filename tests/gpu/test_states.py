"""Models with a state of each sequence on the cuda device, in Triton's interpreter where there is
no GPU: against transformers' own, over whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.config import read_config
from model.checkpoint.memory import cache_pages
from model.opened import open_weights
from pykernels.errors import PykernelsError
from runtime.devices.cuda.layouts import CudaLayouts
from runtime.engine import Engine, EngineConfig
from runtime.planning.execution import ExecutionPlan, largest_step
from runtime.planning.gpu.capacity import free_for_steps
from runtime.planning.gpu.machine import Machine
from runtime.planning.gpu.plan import place_on
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..engine.test_states import CALM, check, greedy, tokens
from ..model import tiny
from ..model.checkpoint.gguf import tiny_gguf
from ..runners import CudaOptions, cuda_runner

ALL = pytest.mark.all
LENGTH, STEP = 256, 80
"""Tokens of a sequence, and of a step: longer than a page, and no multiple of it."""


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"full_attention_interval": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}
"""A gated delta net or a short convolution, and attention behind it."""


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("lfm2_moe", marks=ALL)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    path, family = tmp_path_factory.mktemp("states"), request.param
    sizes = {"max_position_embeddings": LENGTH, "num_hidden_layers": 2, **FAMILIES[family]}
    return tiny.make(path, family, gains=CALM, **sizes)


@contextmanager
def engine(
    path: Path, device: torch.device, pages: int, options: CudaOptions, gpus: int = 1
) -> Iterator[Engine]:
    """Its experts are on the GPU, unless ``options`` say otherwise; two sequences run at once."""
    every = [f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(gpus)]
    if len(every) > torch.cuda.device_count() > 0:
        pytest.skip(f"there are fewer than {gpus} GPUs")
    with WorkerPool(1 if device.type == "cpu" else 2, driver_works=False) as pool:
        with open_weights(path, read_config(path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        sizes = LENGTH, pages, STEP, 2, "generic"
        runner = cuda_runner(decoder, ",".join(every), pool, *sizes, options=options)
        runner.load()
        with Engine(runner, config=EngineConfig(snapshot_tokens=64)) as found:
            yield found
        runner.close()


ON_GPU = CudaOptions("gpu")


def test_chunks_neighbours_and_snapshots(made: tiny.Tiny, device: torch.device) -> None:
    """Prompts in chunks beside decodes, then a second turn, which goes on from a snapshot."""
    prompts = [tokens(n, n) for n in (123, 9)]
    with engine(made.path, device, 16, ON_GPU) as found:
        first = found.generate(prompts, greedy(6))
        turn = [*prompts[0], *first[0].token_ids, *tokens(10, 2)]
        [second] = found.generate([turn], greedy(3))
    for prompt, result in zip((*prompts, turn), (*first, second), strict=True):
        check(made, prompt, result, "cuda")
    assert second.completions[0].stats.cached_tokens == 128


def test_forks_and_preempted_requests(made: tiny.Tiny, device: torch.device) -> None:
    with engine(made.path, device, 3, ON_GPU) as found:
        prompt = tokens(70, 4)
        [forked] = found.generate([prompt], greedy(3, n=2))
        check(made, prompt, forked, "cuda")
        prompts = [tokens(62, seed) for seed in (5, 6)]
        results = found.generate(prompts, greedy(5))
        assert found.stats.preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        check(made, prompt, result, "cuda")


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (2, ON_GPU),
        pytest.param(1, CudaOptions("cpu", prefill="stream"), marks=ALL),
        pytest.param(1, CudaOptions("cpu", dual_batch=True), marks=ALL),
    ],
    ids=["two GPUs", "streamed", "two lanes"],
)
def test_states_beside(
    gpus: int, options: CudaOptions, made: tiny.Tiny, device: torch.device
) -> None:
    """Layers on two GPUs, experts on the CPU, streamed to the GPU, and lanes of a step."""
    prompts = [tokens(n, n) for n in (20, 9)]
    with engine(made.path, device, 16, options, gpus) as found:
        results = found.generate(prompts, greedy(3))
    for prompt, result in zip(prompts, results, strict=True):
        check(made, prompt, result, "cuda")


def test_value_heads_in_the_order_of_a_gguf_file(tmp_path: Path, device: torch.device) -> None:
    """Qwen3.5's, which go over the key heads in turns."""
    file = tmp_path / "m.gguf"
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
    sizes |= {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "gains": CALM}
    sizes |= {"shared_expert_intermediate_size": 48, "max_position_embeddings": LENGTH}
    kind = tiny_gguf.all_of(tiny_gguf.Type.BF16)
    reference = tiny_gguf.write(file, "qwen3_5_moe_text", kind, **sizes)
    prompt = tokens(9, 3)
    with engine(file, device, 8, ON_GPU) as found:
        [result] = found.generate([prompt], greedy(2))
    check(tiny.Tiny(file, {}, reference), prompt, result, "cuda")


def test_states_take_memory_of_a_gpu(made: tiny.Tiny) -> None:
    """Of the one layer that has a state, for each slot: three inputs of 192 channels and 4 heads of
    16 x 32, or two inputs of 64 channels."""
    delta = made.reference.config.model_type == "qwen3_next"
    state = 4 * (3 * 192 + 4 * 16 * 32) if delta else 4 * 2 * 64
    with open_weights(made.path, read_config(made.path)) as weights:
        decoder = weights.decoder

        def free(slots: int) -> int:
            sizes = replace(largest_step(LENGTH, 8, STEP), state_slots=slots)
            machine = Machine({"cuda:0": 1 << 30}, CudaLayouts())
            plan = ExecutionPlan(sizes, place_on(machine, decoder, sizes, "gpu"))
            return free_for_steps(decoder, machine, plan)["cuda:0"]

        assert free(2) - free(5) == 3 * state
        many = largest_step(LENGTH, 8, STEP, state_slots=(5 << 28) // state)
        experts = [
            place_on(Machine({"cuda:0": 1 << 30}, CudaLayouts()), decoder, each, "auto").experts
            for each in (largest_step(LENGTH, 8, STEP), many)
        ]
        assert experts == ["cuda:0", "cpu"]
    memory = partial(cache_pages, EngineConfig(), LENGTH, 64, 1 << 20, {}, on_gpu=1 << 20)
    assert memory(states=1 << 20) < memory(states=0)
    with pytest.raises(PykernelsError, match="States of sequences of 2.0 MiB.*fewer snapshots"):
        memory(states=2 << 20)
