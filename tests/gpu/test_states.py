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

import model
from model.checkpoint.cache_cost import CacheCost
from model.checkpoint.config import read_config
from model.checkpoint.identity import identity
from model.checkpoint.memory import cache_pages
from model.opened import open_weights
from pykernels.errors import PykernelsError
from runtime.devices.cuda.layouts import CudaLayouts, machine_of
from runtime.devices.cuda.memory.buffers import Arena
from runtime.devices.cuda.memory.pinning import pin_experts
from runtime.devices.cuda.resources import CudaResources
from runtime.devices.cuda.runner import CudaRunner
from runtime.devices.gpus import gpus_of
from runtime.engine import Engine, EngineConfig
from runtime.experts.cache import CachePolicy
from runtime.kv_tiers.behind import KvBehind
from runtime.kv_tiers.counts import Counts
from runtime.planning.compile import compile
from runtime.planning.execution import ExecutionPlan, Phase, largest_step
from runtime.planning.gpu.capacity import free_for_steps
from runtime.planning.gpu.dense import crossing_weights
from runtime.planning.gpu.machine import Machine
from runtime.planning.gpu.plan import place_on
from runtime.planning.prompt_sizes import PromptSizes
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..engine.test_states import CALM, ERROR, check, greedy, tokens
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
    path: Path,
    device: torch.device,
    pages: int,
    options: CudaOptions,
    gpus: int = 1,
    kv_disk: Path | None = None,
    crossing: bool = False,
) -> Iterator[Engine]:
    """Two sequences run at once; ``crossing``: dense weights come to the GPU in each step."""
    config = read_config(path)
    every = [f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(gpus)]
    if len(every) > torch.cuda.device_count() > 0:
        pytest.skip(f"there are fewer than {gpus} GPUs")
    with WorkerPool(1 if device.type == "cpu" else 2, driver_works=False) as pool:
        with open_weights(path, config) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            known = identity(config, weights.files)
        if crossing:
            machine = machine_of(gpus_of(every[0]), decoder.store)
            largest = largest_step(LENGTH, pages, STEP)
            plan = ExecutionPlan(largest, place_on(machine, decoder, largest, options.experts))
            options = replace(options, crossing=crossing_weights(decoder, machine, plan, 0))
            assert options.crossing
        sizes = LENGTH, pages, STEP, 2, "generic"
        runner = cuda_runner(decoder, ",".join(every), pool, *sizes, options=options)
        runner.load()
        tiers = None
        if kv_disk is not None:
            tiers = partial(KvBehind(1 << 20, kv_disk, 1 << 30, "tiny", known).tiers, runner)
        with Engine(runner, config=EngineConfig(snapshot_tokens=64), tiers=tiers) as found:
            yield found
        runner.close()


ON_GPU = CudaOptions("gpu")


def test_chunks_neighbours_and_snapshots(made: tiny.Tiny, device: torch.device) -> None:
    """Prompts in chunks in parallel with decodes, then a second turn, which goes on from a
    snapshot."""
    prompts = [tokens(n, n) for n in (123, 9)]
    with engine(made.path, device, 16, ON_GPU) as found:
        first = found.generate(prompts, greedy(6))
        turn = [*prompts[0], *first[0].token_ids, *tokens(10, 2)]
        [second] = found.generate([turn], greedy(3))
    for prompt, result in zip((*prompts, turn), (*first, second), strict=True):
        check(made, prompt, result, "cuda")
    assert second.completions[0].stats.cached_tokens == 128


def test_a_prompt_of_one_step_leaves_a_snapshot(made: tiny.Tiny, device: torch.device) -> None:
    """The step goes on behind the last full page, beside another prompt and a decode."""
    prompt = tokens(71, 3)
    other = [*prompt[:66], *tokens(9, 4)]
    with engine(made.path, device, 16, ON_GPU) as found:
        [first] = found.generate([prompt], greedy(3))
        assert found.stats.steps == 3
        second, third = found.generate([other, tokens(76, 5)], greedy(4))
    assert second.completions[0].stats.cached_tokens == 64
    for ids, result in ((prompt, first), (other, second), (tokens(76, 5), third)):
        check(made, ids, result, "cuda")


def test_another_device_has_written_the_blocks(
    made: tiny.Tiny, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU reads the first turn, a GPU the second one, and the CPU the third."""
    # A GPU computes so small a model faster than blocks are read, and would write none.
    monkeypatch.setattr(Counts, "pays", lambda *_: True)
    sizes = {"max_model_len": LENGTH, "snapshot_tokens": 64, "threads": 1, "max_num_seqs": 2}
    turn = tokens(70, 8)
    for cached, on_gpu in ((0, False), (64, True), (128, False)):
        with (
            engine(made.path, device, 16, ON_GPU, kv_disk=tmp_path)
            if on_gpu
            else model.load_engine(made.path, kv_disk=tmp_path, **sizes)
        ) as found:
            own = found if isinstance(found, Engine) else found.engine
            [result] = own.generate([turn], greedy(6))
        assert result.completions[0].stats.cached_tokens == cached
        check(made, turn, result, "cuda")
        turn += [*result.token_ids, *tokens(54, 9)]


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


SLOTS: dict[str, Any] = {
    "slots": {1: 3},
    "policy": CachePolicy("lfu", swaps=2, half_life=4, margin=0),
}
"""An expert cache whose slots change in each step."""
BESIDE = {
    "streamed": CudaOptions("cpu", prefill="stream"),
    "split": CudaOptions("cpu", prefill="split"),
    "two microbatches": CudaOptions("cpu", dual_batch=True),
    "cache": CudaOptions("cpu", dual_batch=True, **SLOTS),
    "cache and split": CudaOptions("cpu", prefill="split", **SLOTS),
    "cache and streamed": CudaOptions("cpu", prefill="stream", **SLOTS),
    "gpu experts": CudaOptions("cpu", gpu_experts={1: (2, 5)}, prefill="split"),
    "dense weights cross": CudaOptions("cpu", dual_batch=True, prefill="split"),
    "dense weights cross, all on the GPU": CudaOptions("gpu"),
}
"""What moves experts and weights, or cuts steps in two."""


@pytest.mark.parametrize(
    ("gpus", "how"), [(2, "two GPUs"), *(pytest.param(1, how, marks=ALL) for how in BESIDE)]
)
def test_states_beside(gpus: int, how: str, made: tiny.Tiny, device: torch.device) -> None:
    """A prompt in chunks beside another, and a second turn, which begins at a snapshot."""
    options, crossing = BESIDE.get(how, ON_GPU), how.startswith("dense")
    prompts = [tokens(n, n) for n in (70, 9)]
    with engine(made.path, device, 16, options, gpus, crossing=crossing) as found:
        results = found.generate(prompts, greedy(4))
        turn = [*prompts[0], *results[0].token_ids, *tokens(10, 2)]
        [second] = found.generate([turn], greedy(3))
    assert second.completions[0].stats.cached_tokens == 64
    for prompt, result in zip((*prompts, turn), (*results, second), strict=True):
        check(made, prompt, result, "cuda")


@pytest.mark.all
@pytest.mark.parametrize(
    "options",
    [
        CudaOptions("cpu", deferred=1, prefill="split", **SLOTS),
        CudaOptions("cpu", deferred=1, prefill="stream"),
        CudaOptions("cpu", deferred=1, dual_batch=True),
    ],
    ids=["cache and split", "streamed", "two microbatches"],
)
def test_states_with_deferral(options: CudaOptions, made: tiny.Tiny, device: torch.device) -> None:
    """The text is that of the float32 reference, which defers the same experts, whatever else is in
    a step."""
    prompts = [tokens(n, n) for n in (70, 9)]
    with engine(made.path, device, 16, options) as found:
        together = found.generate(prompts, greedy(4))
        alone = [found.generate([prompt], greedy(4))[0] for prompt in prompts]
    with model.load_engine(made.path, device="ref", defer=1, max_model_len=LENGTH) as llm:
        wanted = llm.engine.generate(prompts, greedy(4))
    for one, other, truth in zip(together, alone, wanted, strict=True):
        assert one.token_ids == other.token_ids
        drawn = zip(one.completions[0].logprobs, truth.completions[0].logprobs, strict=True)
        for a, b in drawn:
            assert abs(a.logprob - b.logprob) < ERROR["cuda"]
            if a.token != b.token:
                break  # a near-tie, behind which the texts are others


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


def test_a_decode_step_of_a_delta_net_has_two_launches(made: tiny.Tiny) -> None:
    """Between the linears around them; prompts have the four ops apart, LFM2's layer has one. A
    gated shared expert has one more for its factor."""
    with open_weights(made.path, read_config(made.path)) as weights:
        sizes = largest_step(LENGTH, 8, STEP)
        machine = Machine({"cuda:0": 1 << 30}, CudaLayouts())
        plan = ExecutionPlan(sizes, place_on(machine, weights.decoder, sizes, "gpu"))

        def ops(phase: Phase) -> list[str]:
            nodes = compile(weights.decoder, plan, phase, 8).program.nodes
            return [node.op for node in nodes if node.layer == 0]

        def mixer(phase: Phase) -> list[str]:
            names = ops(phase)
            first = names.index("linear") + 1
            return names[first : names.index("linear", first)]

        found = mixer(Phase.DECODE), mixer(Phase.PROMPT)
        factors = [names.count("shared_factor") for names in map(ops, (Phase.DECODE, Phase.PROMPT))]
    if made.reference.config.model_type == "qwen3_next":
        apart = ["causal_conv1d", "delta_gates", "gated_delta_rule", "gated_rms_norm"]
        assert found == (["delta_step", "delta_norm"], apart) and factors == [1, 0]
    else:
        assert found == (["causal_conv1d"], ["causal_conv1d"])


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
    memory = partial(
        cache_pages, EngineConfig(), LENGTH, CacheCost(64), 1 << 20, {}, on_gpu=1 << 20
    )
    assert memory(states=1 << 20) < memory(states=0)
    with pytest.raises(PykernelsError, match="States of sequences of 2.0 MiB.*fewer snapshots"):
        memory(states=2 << 20)


def test_steps_that_stream_have_the_memory_of_the_others(
    made: tiny.Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step runs at a time, so the largest one's memory is enough, if it is the first to ask."""
    asked, take = list[int](), Arena.take
    monkeypatch.setattr(Arena, "take", lambda self, n: asked.append(n) or take(self, n))
    where, options = "cpu", CudaOptions("cpu", prefill="stream")
    if device.type == "cuda":
        where = "cuda:0"
    with WorkerPool(1 if device.type == "cpu" else 2, driver_works=False) as pool:
        with open_weights(made.path, read_config(made.path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        sizes = LENGTH, 8, STEP, 2, "generic"
        plan = cuda_runner(decoder, where, pool, *sizes, options=options).plan
        plan = replace(plan, prompts=PromptSizes((8,), (), (STEP,), 9, 9))
        runner = CudaRunner(CudaResources.open(decoder, plan, where, pool), plan)
        runner.load()
        if device.type == "cuda":
            pin_experts(plan.streaming, runner.compiled().program, decoder.store, runner.pinned)
        with Engine(runner):
            assert [step.program.sizes["T"] for step in runner.steps] == [8, STEP]
        runner.close()
    assert asked[0] == max(asked) > min(asked)
