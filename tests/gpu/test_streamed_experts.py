"""Prompts whose experts lie in main memory and are computed on the cuda device, in Triton's
interpreter where there is no GPU: the truth is transformers' own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bench.prefill.run import crossing
from model.checkpoint.config import read_config
from model.load import load_engine
from model.opened import open_weights
from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.devices.cuda.memory.pinning import pin_experts
from runtime.engine import Engine, SamplingParams
from runtime.planning.compile import compile
from runtime.planning.execution import Phase
from runtime.planning.gpu.stream_budget import balanced_tokens
from runtime.planning.gpu.with_rates import with_pinned
from runtime.planning.prefill_rates import (
    Rates,
    balanced_share,
    choose,
    split_range,
    turning_point,
)
from runtime.planning.prompt_sizes import PromptSizes
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool, make_pool

from ..cpu.routed import TWO_CORES
from ..model import tiny
from ..model.checks import logprob_error
from ..runners import CudaOptions, cuda_runner

BF16 = 0.06
"""Of the norm of a token's logprobs: activations are bfloat16."""


@pytest.mark.parametrize(
    ("sizes", "beside", "nodes"),
    [
        ({}, {}, 1),
        pytest.param({}, {0: (2, 5)}, 1, marks=pytest.mark.all),
        pytest.param({"moe_intermediate_size": 256}, {}, 2, marks=(TWO_CORES, pytest.mark.all)),
    ],
    ids=["all", "some-in-slots", "numa"],
)
def test_logprobs_are_transformers(
    sizes: dict[str, int],
    beside: dict[int, tuple[int, ...]],
    nodes: int,
    tmp_path: Path,
    device: torch.device,
) -> None:
    """Prompts in chunks, and decode steps, which leave the experts on the CPU."""
    made = tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2, **sizes)
    prompts = [5, 17, 60, 33, 8, 90], [7, 41, 2]
    with torch.no_grad():
        truth = [
            made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in prompts
        ]
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with env.override(fake_numa=nodes), make_pool(nodes, nodes > 1, "auto") as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None, pool.memory)
            runner = cuda_runner(
                decoder,
                where,
                pool,
                64,
                None,
                4,
                2,
                "generic",
                max_num_logits=4,
                options=CudaOptions(experts="cpu", gpu_experts=beside, prefill="stream"),
            )
            runner.load()
        with Engine(runner) as engine:
            params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, logprob_start=1)
            results = engine.generate(list(prompts), params)
        step: Any = runner.steps[0]
        decode = runner.decode_steps[0]
        for program, streamed in ((decode.program, False), (step.program, True)):
            routed = [node for node in program.nodes if node.role == "routed"]
            assert {node.device != "cpu" for node in routed} == {streamed}
        found, spec = crossing(runner, 6), step.program.weight(routed[0], "experts")
        assert (found.steps, found.streamed) == (2, 2)
        assert len(decoder.store.nodes) == nodes
        crossed = 2 * 8 - sum(map(len, beside.values()))  # layers, experts
        assert found.nbytes == 2 * crossed * spec.bytes_per_expert  # steps
        loads = sum(node.op == "load_experts" for node in step.program.nodes)
        launches = len(step.program.nodes) + 1  # the results
        assert len(step.without_copies().launches) == launches - loads
        runner.close()
        with pytest.raises(PykernelsError, match="experts on the GPU: nothing has to cross"):
            cuda_runner(
                decoder,
                where,
                pool,
                64,
                None,
                4,
                options=CudaOptions(experts="gpu", prefill="stream"),
            )
    for result, wanted in zip(results, truth, strict=True):
        assert logprob_error(result, wanted) < BF16


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", CudaOptions("cpu")),
        ("gpt_oss", CudaOptions("cpu")),
        ("qwen3_moe", CudaOptions("cpu", slots={0: 3, 1: 2})),
        pytest.param(
            "qwen3_moe", CudaOptions("cpu", gpu_experts={0: (2, 5)}), marks=pytest.mark.all
        ),
    ],
    ids=["qwen3_moe", "gpt_oss", "beside-a-cache", "beside-gpu-experts"],
)
def test_split_prompts_are_transformers(
    family: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    """Half of the experts cross; chunks of 4 tokens and decode steps follow each other."""
    made = tiny.make(tmp_path, family, num_hidden_layers=2)
    prompt = [5, 17, 60, 33, 8, 90]
    with torch.no_grad():
        truth = made.reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            options = replace(options, prefill="split")
            runner = cuda_runner(
                decoder, where, pool, 64, None, 4, 2, "generic", (), 4, options=options
            )
            runner.load()
        with Engine(runner) as engine:
            params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, logprob_start=1)
            [result] = engine.generate([prompt], params)
        program = runner.steps[0].program
        loads = [node.attr("count") for node in program.nodes if node.op == "load_experts"]
        assert 0 < sum(loads) < 2 * 8
        runner.close()
    assert logprob_error(result, truth) < BF16


def test_prompts_are_streamed_beside_a_cache(tmp_path: Path, device: torch.device) -> None:
    """While requests decode whose steps fill its slots, by what the prompts have chosen too."""
    made = tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    prompts = [5, 17, 60, 33, 8], [7, 41, 2]
    with torch.no_grad():
        truth = [
            made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in prompts
        ]
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            options = CudaOptions("cpu", prefill="stream", slots={0: 3, 1: 3})
            runner = cuda_runner(
                decoder, where, pool, 64, None, 4, 2, "generic", (), 4, options=options
            )
            runner.load()
        with Engine(runner) as engine:
            slots = runner.expert_slots
            assert runner.prefill_runner is not None and slots is not None
            engine.generate([prompts[0]], SamplingParams(max_tokens=1))
            slots.plan()  # counts the prompt, of which no step has decoded yet
            assert slots.cache.scores.values.any() and not slots.stats.choices
            params = SamplingParams(temperature=0, max_tokens=3, logprobs=20, logprob_start=1)
            results = engine.generate(list(prompts), params)
        runner.close()
    for result, wanted in zip(results, truth, strict=True):
        assert logprob_error(result, wanted) < BF16


class OneLayer:
    """A system that pins no more than one layer."""

    def __init__(self) -> None:
        self.pinned = 0

    def add(self, memory: torch.Tensor) -> str | None:
        self.pinned += memory.nbytes
        return None if self.pinned == memory.nbytes else "no more than that"


def test_layers_that_cannot_be_pinned_stay_on_the_cpu(tmp_path: Path, device: torch.device) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            runner = cuda_runner(
                decoder,
                where,
                pool,
                64,
                None,
                4,
                2,
                "generic",
                options=CudaOptions(experts="cpu", prefill="stream"),
            )
            program, system = runner.compiled(tokens=4).program, OneLayer()
            assert runner.plan.streaming is not None
            pinned = pin_experts(runner.plan.streaming, program, decoder.store, cast(Any, system))
    with pytest.warns(UserWarning, match="of 1 of 2 layers are streamed .* no more than that"):
        plan = with_pinned(runner.plan, program, *pinned)
    nodes = compile(decoder, plan, Phase.STREAMED, 4).program.nodes
    devices = {node.layer: node.device for node in nodes if node.role == "routed"}
    assert devices[0] != "cpu" and devices[1] == "cpu"
    assert {node.layer for node in nodes if node.role == "load"} == {0}


@pytest.mark.gpu
def test_rates_are_measured(tmp_path: Path) -> None:
    made = tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    ids = list(range(2, 40))
    with torch.no_grad():
        truth = made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    with load_engine(tmp_path, device="cuda:0", experts="cpu", max_model_len=64) as llm:
        runner: Any = llm.runner
        assert runner.plan.streaming.link_bytes_per_s > 1e9
        assert runner.plan.prompts is not None and "all cross in" in runner.decisions[0]
        assert runner.pinned.nbytes == sum(
            spec.nbytes for spec in runner.decode_steps[0].program.weights.values() if spec.moe
        )
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, logprob_start=1)
        [result] = llm.engine.generate([ids], params)
    assert not runner.pinned.nbytes
    assert logprob_error(result, truth) < BF16


def test_experts_that_cannot_cross(tmp_path: Path, device: torch.device) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=64)
    rule = {
        "match": {"class": "Qwen3MoeSparseMoeBlock"},
        "replace": {"class": "FusedMoE", "kwargs": {"format": "int8", "activations": "int8"}},
    }
    where: Any = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path), [rule]) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        with pytest.raises(PykernelsError, match="cannot be streamed: .* has int8 activations"):
            cuda_runner(
                decoder,
                where,
                pool,
                64,
                None,
                4,
                options=CudaOptions(experts="cpu", prefill="stream"),
            )


@pytest.mark.parametrize(
    ("E", "topk", "bytes_a_number", "tokens"),
    [(128, 8, 144 / 256, 32768), (256, 8, 1.0002, 65536), (8, 2, 144 / 256, 8192)],
    ids=["qwen3-30b-q4_k", "deepseek-v3-fp8", "mixtral-q4_k"],
)
def test_steps_are_as_long_as_the_link_takes(
    E: int, topk: int, bytes_a_number: float, tokens: int
) -> None:
    numbers = 3 * 2048 * 768
    sizes = round(E * bytes_a_number * numbers), topk * numbers
    assert balanced_tokens(*sizes, 1 << 20) == tokens
    assert balanced_tokens(*sizes, 64) == 4096  # a sequence has no more


def test_which_steps_are_streamed() -> None:
    """The link takes 150 ms a step, the CPU 10 ms and half a millisecond a token."""
    rates = Rates(0.1502, ((64, 0.042), (256, 0.138), (1024, 0.522)))
    assert [choose(tokens, rates) for tokens in (1, 279, 281, 4096)] == ["cpu"] * 2 + ["stream"] * 2
    assert turning_point(rates, 4096) == 280 and turning_point(rates, 100) == 100
    assert turning_point(Rates(0.15, ((64, 0.2), (256, 0.2))), 4096) == 0
    assert turning_point(Rates(0.15, ((64, 0.1), (256, 0.1))), 4096) == 4096
    assert not split_range(rates, 4096)
    both = replace(
        rates, split=((64, 0.05), (256, 0.1), (1024, 0.2)), shares=((64, 0.2), (256, 0.6))
    )
    assert split_range(both, 4096) == range(112, 584) and both.share(160) == pytest.approx(0.4)
    assert [choose(tokens, both) for tokens in (64, 280, 1024)] == ["cpu", "split", "stream"]
    sizes = PromptSizes.chosen(both, 4096, may_split=True)
    assert (sizes.min_tokens, sizes.alone) == (
        281,
        584,
    )  # in parallel with decodes nothing is split
    assert sizes.by_cpu[-1] == 111 and sizes.split == (128, 256, 512, 583)
    assert sizes.streamed == (512, 2048, 4096)


def test_the_fastest_share_is_found() -> None:
    """The CPU is twice as fast with what is left as its share says: the link takes 0.15 s."""
    share, seconds = balanced_share(0.15, 0.15, lambda f: max(0.15 * f, 0.075 * (1 - f)))
    assert share == pytest.approx(0.32) and seconds < 0.0512
