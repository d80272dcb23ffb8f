"""Loading: the values end where transformers has them, in every stored layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import model
from model.checkpoint.config import resolve_dtype
from model.modules.moe import routed_experts
from runtime.devices.cpu.routed import CpuExperts

from .. import tiny
from ..checks import (
    Checkpoints,
    Own,
    Tensors,
    change_config,
    change_tensors,
    errors,
    fused_moe,
    logits,
    moe_blocks,
    refused,
)
from ..tiny import ARCHITECTURES

ALL = "DeepseekV3MoE"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_transformers_own(
    checkpoint: Checkpoints, ids: torch.Tensor, architecture: str
) -> None:
    made = checkpoint(architecture)
    reference = logits(made.reference, ids)
    lm = model.from_pretrained(made.path, dtype="float32")
    assert type(lm) is type(made.reference)
    assert moe_blocks(lm)
    # What is left is the rounding to bfloat16 inside the experts.
    error = errors(logits(lm, ids), reference)
    assert error.median() < 5e-3
    assert error.max() < 3e-2

    lm = model.from_pretrained(made.path)
    assert lm.dtype == torch.bfloat16
    theirs = model.from_pretrained(made.path, rules=[])
    # The median: a token whose experts flip in a near tie is far off in either model.
    ours, own = (errors(logits(m, ids), reference).median() for m in (lm, theirs))
    assert ours < 1.5 * own


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_rules_every_bit_is_transformers(
    checkpoint: Checkpoints, ids: torch.Tensor, architecture: str
) -> None:
    made = checkpoint(architecture)
    lm = model.from_pretrained(made.path, rules=[], dtype="float32")
    want = made.reference.state_dict()
    got = lm.state_dict()
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert torch.equal(logits(lm, ids), logits(made.reference, ids))


def test_other_blocks_are_left_to_transformers(checkpoint: Checkpoints, ids: torch.Tensor) -> None:
    made = checkpoint("deepseek_v3", fp8=True)
    rules = [fused_moe(ALL, r"layers\.2\.")]
    lm = model.from_pretrained(made.path, rules=rules, dtype="float32")
    assert list(moe_blocks(lm)) == ["model.layers.2.mlp"]
    assert errors(logits(lm, ids), logits(made.reference, ids)).median() < 5e-3


CONVERSIONS = [  # the format's own rounding error
    ({}, "fp8", 6e-2),
    ({}, "int8", 2e-2),
    ({}, "int4", 3e-1),
    ({}, "q8_0", 2e-2),
    ({"fp8": True}, "bf16", 2e-2),
    ({"fp8": True}, "int8", 2e-2),
]


@pytest.mark.parametrize(("options", "fmt", "limit"), CONVERSIONS)
def test_a_rule_can_convert_the_experts(
    checkpoint: Checkpoints,
    ids: torch.Tensor,
    tmp_path: Path,
    options: dict[str, Any],
    fmt: str,
    limit: float,
) -> None:
    made, rules = checkpoint("deepseek_v3", **options), tmp_path / "mine.yaml"
    kwargs = f"{{kernel: generic, format: {fmt}}}"
    rules.write_text(
        f"- {{match: {{class: {ALL}}}, replace: {{class: FusedMoE, kwargs: {kwargs}}}}}"
    )
    lm = model.from_pretrained(made.path, rules=rules, dtype="float32")
    assert {routed.backend.name for routed in routed_experts(lm)} == {"generic"}
    assert {routed.weights.fmt.name for routed in routed_experts(lm)} == {fmt}
    assert errors(logits(lm, ids), logits(made.reference, ids)).median() < limit


@pytest.mark.parametrize("architecture", ["deepseek_v3", "mixtral"])
def test_fused_expert_tensors(
    checkpoint: Checkpoints, ids: torch.Tensor, tmp_path: Path, architecture: str
) -> None:
    """The layout of transformers' own parameters, one [E, ...] tensor a projection."""
    made = checkpoint(architecture)
    state = {name: t.bfloat16() for name, t in made.reference.state_dict().items()}
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    tiny.write_shards(tmp_path, state, 1)
    for rules in (None, []):
        lm = model.from_pretrained(tmp_path, rules=rules, dtype="float32")
        assert errors(logits(lm, ids), logits(made.reference, ids)).median() < 6e-3


def fuse(tensors: Tensors) -> None:
    """Every block's experts as one tensor a projection, scales as well."""
    for base in (f"model.layers.{layer}.mlp.experts" for layer in (1, 2)):
        for suffix in ("", "_scale_inv"):
            gate, up, down = (
                torch.stack([tensors.pop(f"{base}.{e}.{p}_proj.weight{suffix}") for e in range(8)])
                for p in ("gate", "up", "down")
            )
            tensors[f"{base}.gate_up_proj{suffix}"] = torch.cat([gate, up], dim=1)
            tensors[f"{base}.down_proj{suffix}"] = down


def test_fused_fp8_tensors(own: Own, ids: torch.Tensor) -> None:
    folder = own("deepseek_v3", fp8=True, shards=1)
    want = logits(model.from_pretrained(folder, dtype="float32"), ids)
    change_tensors(folder, fuse)
    assert torch.equal(logits(model.from_pretrained(folder, dtype="float32"), ids), want)


def test_what_save_pretrained_writes_can_be_loaded(
    checkpoint: Checkpoints, ids: torch.Tensor, tmp_path: Path
) -> None:
    reference = checkpoint("qwen3_moe").reference
    reference.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="stored in F32 and run in bfloat16"):
        lm = model.from_pretrained(tmp_path)
    assert lm.dtype == torch.float32  # as its config says
    assert errors(logits(lm, ids), logits(reference, ids)).median() < 5e-3
    with warnings.catch_warnings():  # as int8 they do not run in bfloat16
        warnings.simplefilter("error")
        rules = [fused_moe("Qwen3MoeSparseMoeBlock", format="int8")]
        model.from_pretrained(tmp_path, rules=rules)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_what_a_base_model_saves_can_be_loaded(
    checkpoint: Checkpoints, ids: torch.Tensor, tmp_path: Path, architecture: str
) -> None:
    """Without the "model." of models with a head, in shards; transformers puts it there."""
    base = checkpoint(architecture, tie_word_embeddings=True).reference.model
    base.save_pretrained(tmp_path, max_shard_size="40KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    lm = model.from_pretrained(tmp_path, rules=[])
    assert type(lm) is type(theirs)
    assert torch.equal(logits(lm, ids), logits(theirs, ids))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_tied_embeddings(own: Own, ids: torch.Tensor, stored: str) -> None:
    folder = own("mixtral", tie_word_embeddings=True, shards=1)
    want = logits(model.from_pretrained(folder, rules=[], dtype="float32"), ids)
    if stored != "embedding":
        change_tensors(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    if stored == "head":
        change_tensors(folder, lambda t: t.pop(EMBEDDING))
    lm = model.from_pretrained(folder, dtype="float32")
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert errors(logits(lm, ids), want).median() < 5e-3


def test_kimi_is_deepseek_under_another_name(own: Own, ids: torch.Tensor) -> None:
    folder = own("deepseek_v3")
    want = logits(model.from_pretrained(folder), ids)
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    change_config(folder, model_type="kimi_k2", auto_map=auto_map)
    lm = model.from_pretrained(folder)
    assert moe_blocks(lm)
    assert torch.equal(logits(lm, ids), want)


def test_multi_token_prediction_layers_are_not_loaded(own: Own) -> None:
    folder = own("deepseek_v3", shards=1, num_nextn_predict_layers=1)
    change_tensors(folder, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}))
    model.from_pretrained(folder)
    change_tensors(folder, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.zeros(2)}))
    refused("has 1 tensors .* no place for: model.layers.4.eh", folder)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def test_computed_buffers_and_biases_stay_float32(checkpoint: Checkpoints) -> None:
    made = checkpoint("deepseek_v3", rope_parameters=YARN)
    lm = model.from_pretrained(made.path)
    rotary, want = lm.model.rotary_emb, made.reference.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, want.inv_freq)
    assert rotary.attention_scaling == want.attention_scaling
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert lm.get_buffer(key).dtype == torch.float32
    assert torch.equal(lm.get_buffer(key), made.stored[key])


def test_the_result_is_ready_for_inference(own: Own) -> None:
    folder = own("deepseek_v3")
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm = model.from_pretrained(folder)
    assert lm.generation_config.temperature == 0.3
    assert not lm.training
    assert not any(p.requires_grad for p in lm.parameters())
    assert not any(t.is_meta for t in [*lm.parameters(), *lm.buffers()])
    assert getattr(lm.config, "quantization_config", None) is None
    assert all(routed.read_bytes == 0 for routed in routed_experts(lm))


def test_kernels_are_compiled_before_the_first_token(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def spy(self: CpuExperts, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        called.append(self.activations)
        return x

    monkeypatch.setattr(CpuExperts, "__call__", spy)
    rules = [
        fused_moe(ALL, rf"\.{layer}\.", format="int8", activations=activations)
        for layer, activations in ((1, "bf16"), (2, "int8"))
    ]
    model.from_pretrained(checkpoint("deepseek_v3").path, rules=rules)
    assert sorted(called) == ["bf16", "int8"]


def test_a_config_without_a_dtype_is_loaded_in_bfloat16() -> None:
    config = PretrainedConfig(dtype=None)
    assert resolve_dtype(None, config) == torch.bfloat16
    assert resolve_dtype("float32", config) == torch.float32
