"""With everything but the routed experts on a GPU: the same results, the experts in main memory."""

from __future__ import annotations

import pytest
import torch

import model
from model.modules.moe import routed_experts
from model.text.generate import generate_stream

from .checks import Checkpoints, errors, logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen2_moe", "mixtral"])
def test_logits_are_those_of_the_cpu(
    checkpoint: Checkpoints, ids: torch.Tensor, architecture: str
) -> None:
    made = checkpoint(architecture)
    lm = model.from_pretrained(made.path, device="cuda:0", dtype="float32")
    assert {t.device.type for t in [*lm.parameters(), *lm.buffers()]} == {"cuda"}
    assert all(not r.weights.down.is_cuda for r in routed_experts(lm))
    got = logits(lm, ids.to("cuda:0")).cpu()
    assert errors(got, logits(made.reference, ids)).median() < 5e-3


def test_blocks_left_to_transformers_are_filled_on_the_gpu(
    checkpoint: Checkpoints, ids: torch.Tensor
) -> None:
    made = checkpoint("deepseek_v3", fp8=True)
    lm = model.from_pretrained(made.path, rules=[], device="cuda:0", dtype="float32")
    assert lm.model.layers[1].mlp.experts.down_proj.is_cuda
    for name, tensor in made.reference.state_dict().items():
        assert torch.equal(lm.state_dict()[name].cpu(), tensor), name


def test_the_shipped_model_writes_the_same_text() -> None:
    tokenizer = model.load_tokenizer(model.EMBEDDED)
    prompt = "def quicksort(xs):"
    cpu, gpu = (
        generate_stream(
            model.from_pretrained(model.EMBEDDED, device=device, dtype="float32"),
            tokenizer,
            prompt,
            max_new_tokens=64,
        )
        for device in ("cpu", "cuda:0")
    )
    assert "".join(gpu) == "".join(cpu)
    assert gpu.stats.read_bytes == cpu.stats.read_bytes


SETS = ("gpu", "embedding-on-cpu,gpu", "kv-cache-on-cpu,gpu")


@pytest.mark.parametrize("rules", SETS)
def test_placed_modules_hand_activations_over(
    checkpoint: Checkpoints, ids: torch.Tensor, rules: str
) -> None:
    made = checkpoint("qwen2_moe")
    lm = model.from_pretrained(made.path, rules=rules, dtype="float32")
    devices = {name: p.device.type for name, p in lm.named_parameters()}
    assert devices["lm_head.weight"] == "cuda"
    assert (devices["model.embed_tokens.weight"] == "cpu") == ("embedding" in rules)
    assert (devices["model.layers.0.self_attn.q_proj.weight"] == "cpu") == ("kv-cache" in rules)
    got = logits(lm, ids)
    assert got.is_cuda
    assert errors(got.cpu(), logits(made.reference, ids)).median() < 5e-3
    out = lm.generate(ids[:1].to("cuda:0"), max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 25)


@pytest.mark.parametrize("wanted", [3, "auto"])
def test_experts_on_the_gpu_beside_those_on_the_cpu(
    checkpoint: Checkpoints, ids: torch.Tensor, wanted: int | str
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    made = checkpoint("qwen3_moe", **sizes)
    lm = model.from_pretrained(made.path, device="cuda:0", dtype="float32", gpu_experts=wanted)
    kept = {r.shape.E for r in routed_experts(lm)}
    assert kept == {5 if wanted == 3 else 1}
    got = logits(lm, ids.to("cuda:0")).cpu()
    assert errors(got, logits(made.reference, ids)).median() < 1e-2


def test_int4_linears_on_the_gpu_are_those_of_the_cpu(ids: torch.Tensor) -> None:
    cpu, gpu = (
        model.from_pretrained(model.EMBEDDED, rules=rules) for rules in ("int4", "int4,gpu")
    )
    want, got = logits(cpu, ids), logits(gpu, ids.to("cuda:0")).cpu()
    assert errors(got, want).median() < 3e-2
