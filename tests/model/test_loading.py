"""Loading: the values end where transformers has them, in every stored layout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

import model
from model.checkpoint import memory
from model.checkpoint.config import read_config, resolve_dtype
from model.checkpoint.plan import Dense, Plan, make_plan
from model.checkpoint.safetensors import Checkpoint
from model.modules.inject import inject
from model.modules.moe import FusedMoE, routed_experts
from model.pretrained import build_meta, resolve_rules
from pykernels.errors import PykernelsError
from runtime.experts.routed import RoutedExperts

from . import tiny
from .tiny import ARCHITECTURES, Tiny

Checkpoints = Callable[..., Tiny]


def logits(lm: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return lm(ids).logits.float()


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """|got - want| / |want| of each token's logits."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def moe_blocks(lm: PreTrainedModel) -> dict[str, FusedMoE]:
    return {name: m for name, m in lm.named_modules() if isinstance(m, FusedMoE)}


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


CASES = [*((a, {}) for a in ARCHITECTURES), ("deepseek_v3", {"fp8": True})]
CASE_IDS = [*ARCHITECTURES, "deepseek_v3 in FP8"]


@pytest.mark.parametrize(("architecture", "options"), CASES, ids=CASE_IDS)
def test_logits_in_a_float32_trunk(
    checkpoint: Checkpoints, ids: torch.Tensor, architecture: str, options: dict[str, Any]
) -> None:
    tiny = checkpoint(architecture, **options)
    lm = model.from_pretrained(tiny.path, dtype="float32")
    assert type(lm) is type(tiny.reference)
    assert moe_blocks(lm)
    # What is left is the rounding to bfloat16 inside the experts.
    error = errors(logits(lm, ids), logits(tiny.reference, ids))
    assert error.median() < 5e-3
    assert error.max() < 3e-2


@pytest.mark.parametrize(("architecture", "options"), CASES, ids=CASE_IDS)
def test_logits_in_bfloat16_are_as_good_as_transformers_own(
    checkpoint: Checkpoints, ids: torch.Tensor, architecture: str, options: dict[str, Any]
) -> None:
    tiny = checkpoint(architecture, **options)
    truth = logits(tiny.reference, ids)
    lm = model.from_pretrained(tiny.path)
    assert lm.dtype == torch.bfloat16
    theirs = model.from_pretrained(tiny.path, rules=[])
    # The median: a token whose experts flip in a near tie is far off in either model.
    ours, own = (errors(logits(m, ids), truth).median() for m in (lm, theirs))
    assert ours < 1.5 * own


@pytest.mark.parametrize(("architecture", "options"), CASES, ids=CASE_IDS)
def test_without_rules_the_model_is_transformers_own_bit_for_bit(
    checkpoint: Checkpoints, ids: torch.Tensor, architecture: str, options: dict[str, Any]
) -> None:
    tiny = checkpoint(architecture, **options)
    lm = model.from_pretrained(tiny.path, rules=[], dtype="float32")
    want = tiny.reference.state_dict()
    got = lm.state_dict()
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert torch.equal(logits(lm, ids), logits(tiny.reference, ids))


def test_fp8_experts_are_packed_bit_for_bit(checkpoint: Checkpoints) -> None:
    tiny = checkpoint("deepseek_v3", fp8=True)
    lm = model.from_pretrained(tiny.path)
    for name, block in moe_blocks(lm).items():
        assert block.routed is not None
        for e in range(block.shape.E):
            projections = zip(("gate", "up", "down"), block.routed.weights.unpack(e), strict=True)
            for projection, weight in projections:
                key = f"{name}.experts.{e}.{projection}_proj.weight"
                assert weight.scale is not None
                assert torch.equal(
                    weight.data.view(torch.uint8), tiny.stored[key].view(torch.uint8)
                )
                assert torch.equal(weight.scale, tiny.stored[f"{key}_scale_inv"])


def test_partial_rules_leave_the_other_blocks_to_transformers(
    checkpoint: Checkpoints, ids: torch.Tensor
) -> None:
    rules = [
        {
            "match": {"class": "DeepseekV3MoE", "name": r"layers\.2\."},
            "replace": {"class": "model.modules.moe.FusedMoE"},
        }
    ]
    for options in ({}, {"fp8": True}):
        tiny = checkpoint("deepseek_v3", **options)
        lm = model.from_pretrained(tiny.path, rules=rules, dtype="float32")
        assert list(moe_blocks(lm)) == ["model.layers.2.mlp"]
        assert lm.model.layers[1].mlp.experts.gate_up_proj.shape[0] == 8
        assert errors(logits(lm, ids), logits(tiny.reference, ids)).median() < 5e-3


def test_rules_from_a_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "- match: {class: DeepseekV3MoE}\n"
        "  replace: {class: FusedMoE, kwargs: {kernel: generic, format: fp8}}\n"
    )
    lm = model.from_pretrained(checkpoint("deepseek_v3").path, rules=file, kernel="auto")
    for routed in routed_experts(lm):
        assert routed.backend.name == "generic"
        assert routed.weights.fmt.name == "fp8"


CONVERSIONS = [
    ({}, "fp8", 6e-2, "bf16 quantized while loading: E4M3 keeps 4 bits"),
    ({"fp8": True}, "bf16", 2e-2, "FP8 dequantized while loading: rounded once more"),
    ({}, "int8", 2e-2, "bf16 quantized while loading: 7 bits a group of 128"),
    ({}, "int4", 3e-1, "bf16 quantized while loading: 3 bits a group of 32"),
    ({"fp8": True}, "int8", 2e-2, "FP8 dequantized and quantized again while loading"),
    ({}, "q8_0", 2e-2, "bf16 quantized while loading: 7 bits a block of 32, fp16 scales"),
]


@pytest.mark.parametrize(
    ("options", "fmt", "limit", "why"), CONVERSIONS, ids=range(len(CONVERSIONS))
)
def test_a_rule_can_convert_the_experts(
    checkpoint: Checkpoints,
    ids: torch.Tensor,
    options: dict[str, Any],
    fmt: str,
    limit: float,
    why: str,
) -> None:
    tiny = checkpoint("deepseek_v3", **options)
    replace = {"class": "FusedMoE", "kwargs": {"format": fmt}}
    rules = [{"match": {"class": "DeepseekV3MoE"}, "replace": replace}]
    lm = model.from_pretrained(tiny.path, rules=rules, dtype="float32")
    assert {routed.weights.fmt.name for routed in routed_experts(lm)} == {fmt}
    error = errors(logits(lm, ids), logits(tiny.reference, ids)).median()
    assert error < limit, why


@pytest.mark.parametrize("architecture", ["deepseek_v3", "mixtral", "qwen2_moe"])
def test_fused_expert_tensors_are_understood(
    checkpoint: Checkpoints, ids: torch.Tensor, tmp_path: Path, architecture: str
) -> None:
    """The layout of transformers' own parameters, one [E, ...] tensor a projection."""
    made = checkpoint(architecture)
    state = {name: t.bfloat16() for name, t in made.reference.state_dict().items()}
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    tiny.write_shards(tmp_path, state, 1)
    truth = logits(made.reference, ids)
    for rules in (None, []):
        lm = model.from_pretrained(tmp_path, rules=rules, dtype="float32")
        assert errors(logits(lm, ids), truth).median() < 6e-3


def test_fused_fp8_tensors_are_understood(
    checkpoint: Checkpoints, ids: torch.Tensor, tmp_path: Path
) -> None:
    made = checkpoint("deepseek_v3", fp8=True)
    state = dict(made.stored)
    for layer in (1, 2):
        base = f"model.layers.{layer}.mlp.experts"
        for suffix in ("", "_scale_inv"):
            each = [
                {
                    p: state.pop(f"{base}.{e}.{p}_proj.weight{suffix}")
                    for p in ("gate", "up", "down")
                }
                for e in range(8)
            ]
            raw = [{p: t.view(torch.uint8) for p, t in one.items()} for one in each]
            kind = each[0]["gate"].dtype
            both = torch.stack([torch.cat([one["gate"], one["up"]]) for one in raw])
            down = torch.stack([one["down"] for one in raw])
            state[f"{base}.gate_up_proj{suffix}"] = both.view(kind)
            state[f"{base}.down_proj{suffix}"] = down.view(kind)
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    tiny.write_shards(tmp_path, state, 1)
    lm = model.from_pretrained(tmp_path, dtype="float32")
    want = model.from_pretrained(made.path, dtype="float32")
    assert torch.equal(logits(lm, ids), logits(want, ids))


def test_fp8_blocks_of_both_gate_and_up_rows_are_told(own: Callable[..., Path]) -> None:
    path = own("deepseek_v3", shards=1, hidden_size=128, moe_intermediate_size=192)
    file = path / "model.safetensors"
    state = load_file(file)
    base = "model.layers.1.mlp.experts."
    state = {name: tensor for name, tensor in state.items() if not name.startswith(base)}
    eight = torch.float8_e4m3fn
    state[f"{base}gate_up_proj"] = torch.zeros(8, 384, 128).to(eight)
    state[f"{base}gate_up_proj_scale_inv"] = torch.ones(8, 3, 1)
    state[f"{base}down_proj"] = torch.zeros(8, 128, 192).to(eight)
    state[f"{base}down_proj_scale_inv"] = torch.ones(8, 1, 2)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(PykernelsError, match="FP8 blocks that hold both gate and up rows"):
        model.from_pretrained(path)


def test_what_save_pretrained_writes_can_be_loaded(
    checkpoint: Checkpoints, ids: torch.Tensor, tmp_path: Path
) -> None:
    reference = checkpoint("qwen3_moe").reference
    reference.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="stored in F32 and run in bfloat16"):
        lm = model.from_pretrained(tmp_path)
    assert lm.dtype == torch.float32  # as its config says
    assert errors(logits(lm, ids), logits(reference, ids)).median() < 5e-3


def test_float32_experts_that_become_codes_are_not_said_to_run_in_bfloat16(
    checkpoint: Checkpoints,
) -> None:
    replace = {"class": "FusedMoE", "kwargs": {"format": "int8"}}
    rules = [{"match": {"class": "Qwen3MoeSparseMoeBlock"}, "replace": replace}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.from_pretrained(checkpoint("qwen3_moe", dtype=torch.float32).path, rules=rules)


def test_bf16_experts_are_loaded_without_a_word(checkpoint: Checkpoints) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.from_pretrained(checkpoint("deepseek_v3").path)


@pytest.mark.parametrize("twice", [False, True], ids=["stored once", "stored twice, the same"])
def test_tied_embeddings(own: Callable[..., Path], ids: torch.Tensor, twice: bool) -> None:
    folder = own("mixtral", tie_word_embeddings=True, shards=1)
    if twice:
        add(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    lm = model.from_pretrained(folder, dtype="float32")
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    want = model.from_pretrained(folder, dtype="float32", rules=[])
    assert errors(logits(lm, ids), logits(want, ids)).median() < 5e-3


def add(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_only_the_tied_head_is_stored(own: Callable[..., Path]) -> None:
    folder = own("mixtral", tie_word_embeddings=True, shards=1)
    add(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    lm = model.from_pretrained(folder)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


def test_tied_but_stored_twice_differently_is_told(own: Callable[..., Path]) -> None:
    folder = own("mixtral", tie_word_embeddings=True, shards=1)
    add(folder, lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}))
    with pytest.raises(PykernelsError, match="ties lm_head.weight .* two different ones"):
        model.from_pretrained(folder)


def test_kimi_is_deepseek_under_another_name(own: Callable[..., Path], ids: torch.Tensor) -> None:
    folder = own("deepseek_v3")
    want = logits(model.from_pretrained(folder), ids)
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    change_config(folder, model_type="kimi_k2", auto_map=auto_map)
    lm = model.from_pretrained(folder)
    assert moe_blocks(lm)
    assert torch.equal(logits(lm, ids), want)


def test_layers_of_multi_token_prediction_are_left_alone(own: Callable[..., Path]) -> None:
    folder = own("deepseek_v3", shards=1, num_nextn_predict_layers=1)
    add(folder, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}))
    model.from_pretrained(folder)
    add(folder, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.zeros(2)}))
    with pytest.raises(PykernelsError, match="has 1 tensors .* no place for: model.layers.4.eh"):
        model.from_pretrained(folder)


def test_computed_buffers_and_the_bias_keep_their_precision(checkpoint: Checkpoints) -> None:
    tiny = checkpoint("deepseek_v3")
    lm = model.from_pretrained(tiny.path)
    rotary, want = lm.model.rotary_emb, tiny.reference.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, want.inv_freq)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = lm.get_buffer(key)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tiny.stored[key])


def test_yarn_is_rebuilt(checkpoint: Checkpoints) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    tiny = checkpoint("deepseek_v3", rope_parameters=rope)
    rotary = model.from_pretrained(tiny.path).model.rotary_emb
    assert torch.equal(rotary.inv_freq, tiny.reference.model.rotary_emb.inv_freq)
    assert rotary.attention_scaling == tiny.reference.model.rotary_emb.attention_scaling


def test_the_result_is_ready_for_inference(checkpoint: Checkpoints, tmp_path: Path) -> None:
    lm = model.from_pretrained(checkpoint("deepseek_v3").path)
    assert not lm.training
    assert not any(p.requires_grad for p in lm.parameters())
    assert not any(t.is_meta for t in [*lm.parameters(), *lm.buffers()])
    assert getattr(lm.config, "quantization_config", None) is None
    for routed in routed_experts(lm):
        assert routed.missing() == []
        assert routed.counters.tokens == 0


def test_the_generation_config_of_the_folder_is_used(own: Callable[..., Path]) -> None:
    folder = own("deepseek_v3")
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    assert model.from_pretrained(folder).generation_config.temperature == 0.3


def test_each_kind_of_experts_is_compiled_before_the_first_token(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def spy(self: RoutedExperts, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        called.append(self.activations)
        return x

    monkeypatch.setattr(RoutedExperts, "__call__", spy)
    rules = [
        {
            "match": {"class": "DeepseekV3MoE", "name": rf"\.{layer}\."},
            "replace": {
                "class": "FusedMoE",
                "kwargs": {"format": "int8", "activations": activations},
            },
        }
        for layer, activations in ((1, "bf16"), (2, "int8"))
    ]
    model.from_pretrained(checkpoint("deepseek_v3").path, rules=rules)
    assert sorted(called) == ["bf16", "int8"]


def test_memory_that_is_just_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 3 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 20, 9 << 20))
    gpu = torch.device("cuda", 0)
    memory.check(3 << 20, 2 << 20, gpu)
    with pytest.raises(PykernelsError, match="needs 3.0 MiB of main memory, 3.0 MiB are free"):
        memory.check((3 << 20) + 1, 0, gpu)
    with pytest.raises(PykernelsError, match="needs 2.0 MiB on cuda:0, 2.0 MiB are free"):
        memory.check(0, (2 << 20) + 1, gpu)


def test_a_config_without_a_dtype_is_loaded_in_bfloat16() -> None:
    config = PretrainedConfig(dtype=None)
    assert resolve_dtype(None, config) == torch.bfloat16
    assert resolve_dtype("float32", config) == torch.float32


def test_a_load_needs_what_stays_and_the_largest_step(checkpoint: Checkpoints) -> None:
    """A step has a tensor, or the matrices of one expert, as stored and in float32."""
    folder, bf16, gpu = checkpoint("qwen3_moe").path, torch.bfloat16, torch.device("cuda", 0)
    config = read_config(folder)
    with Checkpoint(folder) as stored:
        lm = build_meta(config, bf16)
        inject(lm, resolve_rules(None, config.model_type))
        items = make_plan(lm, stored, bf16).items

        def needed(of: list[Any], device: torch.device) -> tuple[int, int]:
            return memory.needed(Plan(of), lm, stored, bf16, device)

        experts = next(item for item in items if not isinstance(item, Dense))
        block: Any = lm.get_submodule(experts.name)
        weights = 3 * block.shape.H * block.shape.I
        packed = RoutedExperts.bytes_needed(block.shape, "bf16")
        assert needed([experts], gpu) == (packed + (2 + 4) * weights, 0)
        dense = [item for item in items if isinstance(item, Dense)]
        sizes = [stored.tensors[item.source.data.name].nbytes for item in dense]
        step = max(sizes) // 2 * (2 + 4 + 2)
        assert needed(dense, gpu) == (step, sum(sizes))
        assert needed(dense, torch.device("cpu")) == (step + sum(sizes), 0)
