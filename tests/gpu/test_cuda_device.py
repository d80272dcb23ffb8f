"""A small model whole on the cuda device, in Triton's interpreter where there is no GPU: the truth
is transformers' own model. ``tests/model/families`` has every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint.config import read_config
from model.modules.moe import FusedMoE
from model.opened import open_weights
from model.pinning.hybrid import gpu_experts_of
from model.rules import default_rules
from model.server.backend.parts import parts
from pykernels.errors import PykernelsError
from pykernels.quant import Format
from runtime.engine import Engine, SamplingParams
from runtime.experts.cache import CachePolicy
from runtime.kv_cache.page_store import Kind
from runtime.planning.placement import Placement
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..engine.test_drafts import Known
from ..model import tiny
from ..model.checks import logprob_error
from ..runners import CudaOptions, cuda_runner, ref_runner, wait_for_slots

BF16 = 0.06
"""A share of the norm of a token's logprobs: activations are bfloat16."""


class Only:
    """A constraint: one token and no other."""

    def __init__(self, token: int) -> None:
        self.token = token

    def begin(self) -> Only:
        return self

    def allowed(self, mask: np.ndarray) -> None:
        mask[self.token // 32] = 1 << self.token % 32

    def accept(self, token: int) -> None:
        assert token == self.token


@pytest.mark.parametrize(
    ("family", "experts", "kv_dtype"),
    [
        ("deepseek_v3", "cpu", "fp8"),
        ("qwen3_moe", "gpu", "bf16"),
        pytest.param("qwen3_moe", "cpu", "fp8", marks=pytest.mark.all),
    ],
)
def test_logprobs_are_transformers(
    family: str, experts: str, kv_dtype: str, tmp_path: Path, device: torch.device
) -> None:
    made = tiny.make(tmp_path, family, num_hidden_layers=2)
    prompts = [5, 17, 60, 33, 8, 90], [7, 41, 2]
    with torch.no_grad():
        truth = [
            made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in prompts
        ]
    where = "cuda:0" if device.type == "cuda" else "cpu"
    packed: list[str] = []

    def pack(fmt: Format, *matrix: Any) -> None:
        packed.append(fmt.name)
        fmt.pack(*matrix)

    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path), kv_dtype=kv_dtype) as weights:
            blocks = [block for block in weights.model.modules() if isinstance(block, FusedMoE)]
            decoder = weights.readable(pack, lambda *_: None)
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
                options=CudaOptions(experts=experts),
            )
            runner.load()
        with Engine(runner) as engine:
            params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, logprob_start=1)
            results = engine.generate(list(prompts), params)
            forcing = SamplingParams(max_tokens=1, constraint=Only(77))
            [forced] = engine.generate([prompts[0]], forcing)
        step: Any = runner.steps[0]
        assert step.memory.tensor("logits").dtype == torch.float32
    for result, wanted in zip(results, truth, strict=True):
        assert logprob_error(result, wanted) < BF16
    assert forced.token_ids == (77,)
    on_cpu = sum(block.shape.E for block in blocks) if experts == "cpu" else 0
    assert len(packed) == 3 * on_cpu  # nothing else is packed for the CPU
    assert forced.token_ids == (77,)


def test_some_experts_of_a_layer_beside_those_of_the_cpu(
    tmp_path: Path, device: torch.device
) -> None:
    """In prompts and in decode steps, and after a slot has lost its expert."""
    made = tiny.make(tmp_path, "qwen2_moe", num_hidden_layers=2)
    ids = [5, 17, 60, 33, 8, 90]
    with torch.no_grad():
        truth = made.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, logprob_start=1)
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
            program = decoder.lower()
            beside = gpu_experts_of(1, program, Placement("cuda:0"), {"cuda:0": 1 << 30})
            assert beside == {0: (0,), 1: (0,)}
            beside = {0: (2, 5), 1: (1,)}
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
                options=CudaOptions(experts="cpu", gpu_experts=beside),
            )
            runner.load()
        with Engine(runner) as engine:
            [result] = engine.generate([ids], params)
            step: Any = runner.steps[0]
            told = {part.device: part for part in parts(step.program, runner.expert_slots)}
            assert told.pop("cpu").pinned == 0
            assert [part.pinned for part in told.values()] == [3]
            node = next(n for n in step.program.nodes if n.role == "cached")
            assert len(step.memory.weight(node, "experts").down) == 2
            assert logprob_error(result, truth) < BF16
            taken = [step.memory.tensor(f"layer{i}.ids.cached") for i in range(2)]
            assert any(int(slots.max()) >= 0 for slots in taken)
            for name, table in runner.caches.items():
                if name.endswith(".slots"):
                    table[5] = table[1] = -1
            [result] = engine.generate([ids], params)
            assert logprob_error(result, truth) < BF16


def test_slots_hold_other_experts_from_step_to_step(tmp_path: Path, device: torch.device) -> None:
    made = tiny.make(tmp_path, "qwen2_moe", num_hidden_layers=1)
    ids = [5, 17, 60, 33, 8, 90]
    where = "cuda:0" if device.type == "cuda" else "cpu"
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=20, ignore_eos=True)
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
                options=CudaOptions(
                    experts="cpu", slots={0: 2}, policy=CachePolicy("lru-fixed", swaps=2)
                ),
            )
            runner.load()
        wait_for_slots(runner)
        with Engine(runner, threaded=False) as engine:
            [result] = engine.generate([ids], params)
        assert runner.expert_slots is not None
        stats = runner.expert_slots.stats
        runner.close()
    assert 0 < stats.hits < stats.choices
    assert stats.swaps > 2  # more than there are slots
    tokens = [*ids, *result.token_ids]
    with torch.no_grad():
        truth = made.reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    for at, found in enumerate(result.completions[0].logprobs):
        chosen, values = zip(*found.top, strict=True)
        wanted = truth[len(ids) - 1 + at][list(chosen)]
        assert (torch.tensor(values) - wanted).norm() < BF16 * wanted.norm()


def test_rules_keep_weights_beside_the_gpu(tmp_path: Path, device: torch.device) -> None:
    """The embedding and the shared experts on the CPU: the same tokens."""
    tiny.make(tmp_path, "qwen2_moe", num_hidden_layers=2)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    own = r"^model\.(embed_tokens|layers\.1\.mlp\.shared_expert)$"
    rules = [{"match": {"name": own}, "replace": {"device": "cpu"}}, *default_rules("qwen2_moe")]
    config, found = read_config(tmp_path), []
    with WorkerPool(1, driver_works=False) as pool:
        for each in (rules, None):
            with open_weights(tmp_path, config, each, device="cuda:0") as weights:
                decoder = weights.readable(packer(pool), lambda *_: None)
            options = CudaOptions("gpu", placed=weights.placed.weights)
            runner = cuda_runner(decoder, where, pool, 64, None, 4, 2, "generic", options=options)
            devices = {node.name: node.device for node in runner.compiled(tokens=4).program.nodes}
            on_cpu = {name for name, at in devices.items() if at == "cpu"} - {"sample"}
            assert on_cpu == ({"embed", "layer1.shared"} if each else set())
            with Engine(runner) as engine:
                [result] = engine.generate([[5, 17, 60]], params)
                found.append(list(result.token_ids))
    assert found[0] == found[1]
    match = {"name": r"layers\.0\.self_attn$"}
    rules = [{"match": match, "replace": {"device": "cpu"}}, *default_rules("qwen2_moe")]
    with pytest.raises(PykernelsError, match="places attention of layer 0 on cpu; the engine"):
        with open_weights(tmp_path, config, rules, device="cuda:0"):
            pass


def test_the_deferral_that_is_chosen_is_what_runs(tmp_path: Path, device: torch.device) -> None:
    """The ref device with as many deferred experts is the truth of decode steps, wherever these
    are."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=3)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=20, ignore_eos=True)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        sizes = 64, None, 4, 2
        runner = cuda_runner(
            decoder,
            where,
            pool,
            *sizes,
            "generic",
            options=CudaOptions(experts="cpu", deferred=None, slots={0: 2, 2: 3}),
        )
        with Engine(runner) as engine:
            [found] = engine.generate([[5, 17, 60]], params)
        assert runner.expert_slots is not None and len(runner.expert_slots.specs) == 2  # layers
        assert runner.deferred == 1  # of three: two are immediate; ``runners.RATES``
        exact = ref_runner(decoder, *sizes, deferred=runner.deferred)
        with Engine(exact, threaded=False) as engine:
            [truth] = engine.generate([[5, 17, 60]], params)
    assert found.token_ids[:3] == truth.token_ids[:3]
    errors = []
    for ours, exact in zip(*(r.completions[0].logprobs for r in (found, truth)), strict=True):
        values = dict(ours.top)
        pairs = [(values[token], value) for token, value in exact.top if token in values]
        a, b = torch.tensor(pairs, dtype=torch.float32, device="cpu").T
        assert len(pairs) > 10
        errors.append(float((a - b).norm() / b.norm()))
    assert sorted(errors)[1] < BF16  # a token whose router is undecided may take another expert


def test_two_lanes_draw_what_one_draws(tmp_path: Path, device: torch.device) -> None:
    """Of batches that shrink from three sequences to one, in programs with room for more."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    prompts = [[5], [33], [41]]
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=1 + i, ignore_eos=True)
        for i in range(3)
    ]
    where, found = "cuda:0" if device.type == "cuda" else "cpu", []
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        for microbatches in (False, "auto"):
            sizes = 64, None, 6, 3, "generic"
            options = CudaOptions(experts="cpu", dual_batch=microbatches, decode_buckets=(1,))
            runner = cuda_runner(decoder, where, pool, *sizes, options=options)
            with Engine(runner) as engine:
                found.append([r.token_ids for r in engine.generate(prompts, params)])
        assert [len(step.program.sizes) for step in runner.decode_steps] == [3, 5]
        with pytest.raises(PykernelsError, match="dual_batch with the experts on the GPU"):
            cuda_runner(
                decoder, where, pool, *sizes, options=CudaOptions(experts="gpu", dual_batch=True)
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "microbatches"),
    [("deepseek_v3", False), ("qwen3_moe", "auto")],
    ids=["latents", "microbatches"],
)
def test_drafts_draw_what_is_drawn_without(
    family: str, microbatches: bool | str, tmp_path: Path, device: torch.device
) -> None:
    """Right ones, and where there is room a wrong one, in a step of three sequences."""
    tiny.make(tmp_path, family, num_hidden_layers=2)
    prompts = [[5], [33, 8], [41]]
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=4, ignore_eos=True) for i in range(3)
    ]
    where, drafter = "cuda:0" if device.type == "cuda" else "cpu", Known(lambda right: [*right, 7])
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        options = CudaOptions("cpu", dual_batch=microbatches, buckets=(16,), decode_buckets=(1,))
        sizes = 64, 8, 16, 3, "generic"
        runner = cuda_runner(decoder, where, pool, *sizes, max_num_logits=16, options=options)
        with Engine(runner, threaded=False, drafter=lambda: drafter) as engine:
            plain = engine.generate(prompts, params)
            assert engine.stats.steps == 4
            for result in plain:
                drafter.add(result.prompt_ids, result.token_ids[:3])
            drafted = engine.generate(prompts, params)
            assert engine.stats.steps == 4 + 2
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


def test_activations_that_the_gpu_has_not_are_refused(tmp_path: Path, device: torch.device) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=64)
    rule = {
        "match": {"class": "Qwen3MoeSparseMoeBlock"},
        "replace": {"class": "FusedMoE", "kwargs": {"format": "int8", "activations": "int8"}},
    }
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path), [rule]) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        where = "cuda:0" if device.type == "cuda" else "cpu"
        runner = cuda_runner(
            decoder, where, pool, 64, None, 4, 2, "generic", options=CudaOptions(experts="gpu")
        )
        with pytest.raises(PykernelsError, match="int8 activations"):
            Engine(runner)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_pages_hold_all_that_attention_reads(
    family: str, tmp_path: Path, device: torch.device
) -> None:
    tiny.make(tmp_path, family, num_hidden_layers=2)
    where = "cuda:0" if device.type == "cuda" else "cpu"
    with WorkerPool(1, driver_works=False) as pool:
        with open_weights(tmp_path, read_config(tmp_path)) as weights:
            decoder = weights.readable(packer(pool), lambda *_: None)
        options = CudaOptions("gpu", buckets=(8,), decode_buckets=(1,))
        runner = cuda_runner(decoder, where, pool, 64, None, 8, 1, "generic", options=options)
        runner.load()
        with Engine(runner) as engine:
            engine.generate([[5, 17, 60, 33]], SamplingParams(temperature=0, max_tokens=2))
            store, caches = runner.page_store(), runner.caches
            written = {name: cache.clone() for name, cache in caches.items()}
            assert all(cache.any() for cache in written.values())
            pages = [store.host(store.nbytes(Kind.PAGE)) for _ in range(runner.num_pages)]
            for number, data in enumerate(pages):
                store.read(Kind.PAGE, number, data)
            with torch.inference_mode():
                for cache in caches.values():
                    cache.zero_()
            for number, data in enumerate(pages):
                store.write(Kind.PAGE, number, data)
            assert all(torch.equal(cache, written[name]) for name, cache in caches.items())
        runner.close()
