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
    assert gpu.stats.expert_bytes == cpu.stats.expert_bytes
