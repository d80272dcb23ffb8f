"""`FusedMoE` against the Hugging Face block that it replaces, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.modules.moe import FusedMoE, routed_experts
from pykernels.errors import PykernelsError

from ..checks import Checkpoints, errors, moe_blocks
from ..tiny import ARCHITECTURES

BLOCKS = [each for each in ARCHITECTURES if each != "gemma4_text"]  # it is a layer's own part


@pytest.mark.parametrize("architecture", BLOCKS)
def test_a_block_does_what_it_replaces(checkpoint: Checkpoints, architecture: str) -> None:
    made = checkpoint(architecture)
    lm = model.from_pretrained(made.path, dtype="float32")
    found = moe_blocks(lm)
    assert found
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for name, block in found.items():
        with torch.no_grad():
            original = made.reference.get_submodule(name)
            want = output(original, x)
        got = output(block, x)
        assert (got.shape, got.dtype) == (want.shape, torch.float32)
        # The experts' intermediate is rounded to bfloat16: 2**-9 relative, summed over experts.
        assert errors(got, want).max() < 6e-3
        # ... which is far less than what the routed experts contribute.
        with torch.no_grad():
            down = original.experts.down_proj.clone()
            original.experts.down_proj.zero_()
            without = output(original, x)
            original.experts.down_proj.copy_(down)
        assert errors(without, want).max() > 0.1


def output(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = block(x)
    return found[0] if isinstance(found, tuple) else found  # gpt-oss' has its routing too


def layer(checkpoint: Checkpoints) -> FusedMoE:
    lm = model.from_pretrained(checkpoint("deepseek_v3").path)
    return moe_blocks(lm)["model.layers.1.mlp"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 33), (0, 4)], ids=str)
def test_any_number_of_tokens(checkpoint: Checkpoints, shape: tuple[int, int]) -> None:
    block = layer(checkpoint)
    x = torch.randn(*shape, 64, dtype=torch.bfloat16)
    got = block(x)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    if x.numel():
        each = [block(row.reshape(1, 1, 64)) for row in x.reshape(-1, 64)]
        torch.testing.assert_close(got.reshape(-1, 64), torch.cat(each).reshape(-1, 64))


def test_float16_trunks_lose_nothing(checkpoint: Checkpoints) -> None:
    path = checkpoint("qwen2_moe").path
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(3)).half()
    half, full = (
        moe_blocks(model.from_pretrained(path, dtype=dtype))["model.layers.0.mlp"]
        for dtype in ("float16", "float32")
    )
    got = half(x)
    assert got.dtype == torch.float16
    assert errors(got.float(), full(x.float())).max() < 4e-3


def test_an_error_beside_the_experts_leaves_them_usable(checkpoint: Checkpoints) -> None:
    block = layer(checkpoint)
    x = torch.randn(1, 2, 64, dtype=torch.bfloat16)

    def fail(*_: Any) -> None:
        raise MemoryError("on purpose")

    hook = block.shared_experts.register_forward_hook(fail)
    with pytest.raises(MemoryError, match="on purpose"):
        block(x)
    hook.remove()
    assert torch.isfinite(block(x)).all()


def test_training_is_refused(checkpoint: Checkpoints) -> None:
    lm = model.from_pretrained(checkpoint("deepseek_v3").path)
    ids = torch.tensor([[5, 6]])
    lm.train()
    with pytest.raises(PykernelsError, match=r"model.layers.1.mlp: .* cannot be trained"):
        lm(ids)
    lm.eval()
    embeds = torch.randn(1, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(PykernelsError, match="cannot be trained"):
        lm(inputs_embeds=embeds)


def test_experts_are_neither_parameters_nor_saved(checkpoint: Checkpoints, tmp_path: Path) -> None:
    lm = model.from_pretrained(checkpoint("deepseek_v3").path)
    assert not [n for n, _ in [*lm.named_parameters(), *lm.named_buffers()] if "experts.0" in n]
    addresses = [r.weights.down.data_ptr() for r in routed_experts(lm)]
    lm.to(torch.float32)
    assert [r.weights.down.data_ptr() for r in routed_experts(lm)] == addresses
    with pytest.raises(PykernelsError, match="packed experts are in no state dict"):
        lm.save_pretrained(tmp_path / "saved")


def test_router_logits_can_still_be_recorded(checkpoint: Checkpoints, ids: torch.Tensor) -> None:
    made = checkpoint("qwen3_moe")
    lm = model.from_pretrained(made.path, dtype="float32")
    got = lm(ids, output_router_logits=True)
    with torch.no_grad():
        want = made.reference(ids, output_router_logits=True)
    assert len(got.router_logits) == len(want.router_logits) == 3
    torch.testing.assert_close(got.router_logits[0], want.router_logits[0])
    torch.testing.assert_close(got.aux_loss, want.aux_loss, rtol=2e-2, atol=0)
