"""Bad input, by name: one line with the cause and the hint, before a weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import model
from model.checkpoint.safetensors import Checkpoint
from pykernels.errors import PykernelsError

Own = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = f"{EXPERT}_scale_inv"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def load_fails(said: str, folder: Path, **options: Any) -> None:
    with pytest.raises(PykernelsError, match=said) as raised:
        model.from_pretrained(folder, **options)
    assert "\n" not in str(raised.value)
    assert raised.value.cause and raised.value.hint


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


TENSORS: list[tuple[str, Callable[[Tensors], object], str]] = [
    (
        "a missing expert",
        lambda t: t.pop(EXPERT),
        rf"2 tensors are missing|1 tensors are missing in .*: {EXPERT}",
    ),
    (
        "a missing dense tensor",
        lambda t: t.pop("model.norm.weight"),
        "1 tensors are missing in .*: model.norm.weight. Check that config.json belongs",
    ),
    ("a missing scale", lambda t: t.pop(SCALE), f"1 tensors are missing in .*: {SCALE}"),
    (
        "a tensor nobody wants",
        lambda t: t.update({"model.layers.0.extra.weight": torch.ones(1)}),
        "has 1 tensors that the model has no place for: model.layers.0.extra.weight",
    ),
    (
        "a layer too many",
        lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(1)}),
        "no place for: model.layers.7.mlp.up_proj.weight",
    ),
    (
        "an expert too many",
        lambda t: t.update({EXPERT.replace(".3.", ".8."): t[EXPERT].clone()}),
        r"no place for: model.layers.1.mlp.experts.8.up_proj.weight",
    ),
    (
        "an expert under two names",
        lambda t: t.update({EXPERT.replace("up_proj", "w3"): t[EXPERT].clone()}),
        rf"{EXPERT} and \S+w3.weight are two names of one|\S+w3.weight and {EXPERT} are two",
    ),
    (
        "an expert of a wrong shape",
        lambda t: t.update({EXPERT: t[EXPERT][:, :128]}),
        rf"{EXPERT} has the shape \[128, 128\], the model needs \[128, 256\]",
    ),
    (
        "a dense tensor of a wrong shape",
        lambda t: t.update({"model.norm.weight": torch.ones(7)}),
        r"model.norm.weight has the shape \[7\], the model needs \[256\]",
    ),
    (
        "scales of a wrong shape",
        lambda t: t.update({SCALE: torch.ones(1, 1)}),
        rf"{SCALE} is F32 \[1, 1\], {EXPERT} needs F32 \[1, 2\]",
    ),
    (
        "scales of a wrong dtype",
        lambda t: t.update({SCALE: torch.ones(1, 2, dtype=torch.int32)}),
        rf"{SCALE} is I32 \[1, 2\]",
    ),
    (
        "an expert of a wrong dtype",
        lambda t: (t.pop(SCALE), t.update({EXPERT: torch.ones(128, 256, dtype=torch.int16)})),
        f"{EXPERT} is I16, experts can be BF16, F16, F32, F8_E4M3 or I8",
    ),
    (
        "a dense tensor of a wrong dtype",
        lambda t: (
            t.pop(f"{O_PROJ}_scale_inv"),
            t.update({O_PROJ: torch.ones(t[O_PROJ].shape, dtype=torch.int16)}),
        ),
        f"{O_PROJ} is I16, the model needs BF16, F16, F32 there",
    ),
    (
        "a dense tensor in float64",
        lambda t: (
            t.pop(f"{O_PROJ}_scale_inv"),
            t.update({O_PROJ: torch.ones(t[O_PROJ].shape, dtype=torch.float64)}),
        ),
        f"{O_PROJ} is F64, the model needs BF16, F16, F32 there. Store it as float32",
    ),
    (
        "an expert in float64",
        lambda t: (t.pop(SCALE), t.update({EXPERT: torch.ones(128, 256, dtype=torch.float64)})),
        f"{EXPERT} is F64, experts can be BF16, .*. Store them as float32",
    ),
    (
        "E5M2 weights",
        lambda t: t.update({EXPERT: t[EXPERT].float().to(torch.float8_e5m2)}),
        f"{EXPERT} is F8_E5M2, experts can be",
    ),
    (
        "one expert in another format",
        lambda t: (t.pop(SCALE), t.update({EXPERT: torch.ones(128, 256).bfloat16()})),
        "The experts of model.layers.1.mlp.experts are partly bf16 and partly fp8",
    ),
]


@pytest.mark.parametrize(("name", "change", "said"), TENSORS, ids=[row[0] for row in TENSORS])
def test_tensors(
    own: Own,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Tensors], object],
    said: str,
) -> None:
    folder = own("deepseek_v3", fp8=True, shards=1)
    change_tensors(folder, change)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was loaded"))
    load_fails(said, folder)


def spoil_scale(tensors: Tensors, name: str) -> None:
    tensors[f"{name}_scale_inv"][0, 0] = torch.nan


def spoil_code(tensors: Tensors, name: str) -> None:
    tensors[name].view(torch.uint8)[0, 0] = 0x7F


@pytest.mark.parametrize("spoil", [spoil_scale, spoil_code])
@pytest.mark.parametrize("kind", ["dense", "expert", "expert of transformers", "converted expert"])
def test_codes_and_scales_that_are_no_numbers(
    own: Own, spoil: Callable[[Tensors, str], None], kind: str
) -> None:
    """They are told by their full name, and never become weights."""
    folder = own("deepseek_v3", fp8=True, shards=1)
    name = O_PROJ if kind == "dense" else EXPERT
    change_tensors(folder, lambda t: spoil(t, name))
    replace = {"class": "FusedMoE", "kwargs": {"format": "bf16"}}
    rules: dict[str, Any] = {
        "expert of transformers": [],
        "converted expert": [{"match": {"class": "DeepseekV3MoE"}, "replace": replace}],
    }
    said = r"model.layers.1.mlp.experts.3: expert 3's up_proj" if kind == "expert" else name
    load_fails(f"{said} has .*NaN.* Check the checkpoint", folder, rules=rules.get(kind))


def test_a_tie_to_codes(own: Own) -> None:
    folder = own("mixtral", shards=1, tie_word_embeddings=True)
    change_tensors(
        folder,
        lambda t: t.update(
            {"lm_head.weight": t["model.embed_tokens.weight"].to(torch.float8_e5m2)}
        ),
    )
    load_fails("config ties lm_head.weight to .*, the checkpoint stores two different ones", folder)


def test_a_tie_to_itself_that_holds_nan(own: Own) -> None:
    folder = own("mixtral", shards=1, tie_word_embeddings=True)

    def spoil(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][5, 7] = torch.nan
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, spoil)
    load_fails("lm_head.weight holds NaN. Download the checkpoint again", folder)


GPTQ = {"quant_method": "gptq", "bits": 4}
STATIC = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": [128, 128],
}
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (
        "an unknown architecture",
        {"model_type": "hal9000"},
        "'hal9000' is not known. Use .* mixtral",
    ),
    ("an architecture without rules", {"model_type": "llama"}, "no rules for the architecture"),
    ("one of another kind", {"model_type": "mamba"}, "no rules for the architecture"),
    ("no model_type", {"model_type": None}, "has no model_type"),
    ("another quantization", {"quantization_config": GPTQ}, "quantized with quant_method 'gptq'"),
    ("static scales", {"quantization_config": STATIC}, "with activation_scheme 'static'"),
    (
        "other blocks",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"with weight_block_size \[64, 64\]",
    ),
    (
        "scales a tensor",
        {"quantization_config": {"quant_method": "fp8"}},
        "with weight_block_size None",
    ),
    ("nonsense quantization", {"quantization_config": "yes"}, "with quant_method 'yes'"),
    ("another activation", {"hidden_act": "gelu"}, "uses 'gelu', the kernels have silu only"),
    ("groups that do not share the experts", {"n_group": 3}, r"of 3 groups \(n_group\), which can"),
    ("more open groups than there are", {"topk_group": 5}, r"5 \(topk_group\) of 4 groups"),
    ("fewer open experts than taken", {"topk_group": 1}, "token to 3 of 8 experts, in 1 "),
    ("no groups", {"n_group": None}, r"of None groups \(n_group\), which cannot be"),
    ("zero groups", {"n_group": 0}, r"of 0 groups \(n_group\), which cannot be"),
    ("no open groups", {"topk_group": None}, r"in None \(topk_group\) of 4 groups"),
    ("no number of experts taken", {"num_experts_per_tok": None}, "a token to None of 8 experts"),
    (
        "a billion layers of prediction",
        {"num_nextn_predict_layers": 10**9},
        "has 1000000000 num_nextn_predict_layers beside 3 layers",
    ),
    (
        "layers of prediction that are no number",
        {"num_nextn_predict_layers": "x"},
        "has 'x' num_nextn_predict_layers",
    ),
    ("a value of a wrong type", {"hidden_size": "big"}, "is no valid deepseek_v3 configuration"),
    ("more layers than stored", {"num_hidden_layers": 4}, "tensors are missing in .*layers.3"),
    ("another size", {"moe_intermediate_size": 64}, r"the model needs \[\d+, \d+\]"),
    (
        "shared keys in latent attention",
        {"num_key_value_heads": 1},
        "num_key_value_heads 1, which no model runs with. Set it to 4, as the heads",
    ),
    ("tuples for outputs", {"return_dict": False}, "return_dict False, .* Set it to true"),
    ("an encoder", {"is_encoder_decoder": True}, "is_encoder_decoder True, .* Set it to false"),
    ("no end among none", {"eos_token_id": []}, r"eos_token_id \[\], .* or null for none"),
    ("a strange dtype", {"dtype": "int8"}, "dtype .*int8 cannot be used|no valid deepseek_v3"),
]


@pytest.mark.parametrize(("name", "values", "said"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_configs(own: Own, name: str, values: dict[str, Any], said: str) -> None:
    folder = own("deepseek_v3")
    change_config(folder, **values)
    load_fails(said, folder)


def test_a_router_of_deepseek_v2_that_is_not_known(own: Own) -> None:
    folder = own("deepseek_v2")
    change_config(folder, topk_method="noaux_tc")
    load_fails("topk_method 'noaux_tc', .* one of greedy, group_limited_greedy", folder)
    change_config(folder, topk_method="greedy", n_group=None, topk_group=None)
    model.from_pretrained(folder)  # which has no groups


def test_no_folder(tmp_path: Path) -> None:
    load_fails("There is no folder .*absent. Give the folder", tmp_path / "absent")


def test_no_config(own: Own) -> None:
    folder = own()
    (folder / "config.json").unlink()
    load_fails("config.json is missing", folder)


def test_a_broken_config(own: Own) -> None:
    folder = own()
    (folder / "config.json").write_text('{"model_type": ')
    load_fails("config.json is not valid JSON", folder)


def test_a_config_that_is_a_folder(own: Own) -> None:
    folder = own()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    load_fails("config.json cannot be read", folder)


def test_a_missing_shard(own: Own) -> None:
    folder = own()
    next(folder.glob("model-00001*")).unlink()
    load_fails("1 of 2 shards .* are missing: model-00001-of-00002.safetensors", folder)


def test_a_truncated_shard(own: Own) -> None:
    folder = own()
    file = next(folder.glob("model-00001*"))
    file.write_bytes(file.read_bytes()[:-100])
    load_fails("model-00001-of-00002.safetensors is half-downloaded", folder)


DEVICES = [
    ("tpu:0", "device .*tpu:0"),
    ("nonsense", "There is no device 'nonsense'. Use cpu or cuda:0"),
    ("meta", "The device meta is not supported"),
]


@pytest.mark.parametrize(("device", "said"), DEVICES, ids=[row[0] for row in DEVICES])
def test_devices(own: Own, device: str, said: str) -> None:
    load_fails(said, own(), device=device)


def test_cuda_without_cuda(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    load_fails("cuda:0 was asked for, but this PyTorch sees no CUDA GPU", own(), device="cuda:0")


def test_a_gpu_that_is_not_there(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    load_fails("There is no GPU cuda:3. The last one is cuda:0", own(), device="cuda:3")


def test_options(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was loaded"))
    folder = own()
    load_fails("The dtype int4 cannot be used", folder, dtype="int4")
    load_fails("no.such", folder, kernel="no.such")
    load_fails("threads", folder, threads=100_000)
    load_fails("threads", folder, threads=0)
    load_fails("--numa 99 was asked for", folder, numa=99)
    load_fails("NUMA setting '0' is not known", folder, numa=0)
    load_fails("cannot be read", folder, rules=folder / "absent.yaml")
    load_fails(
        "rule 1 .class 'Nobody'. matches no module",
        folder,
        rules=[{"match": {"class": "Nobody"}, "replace": {"class": "FusedMoE"}}],
    )


def test_a_format_that_the_experts_do_not_fit(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was loaded"))
    replace = {"class": "FusedMoE", "kwargs": {"format": "q4_k"}}
    rules = [{"match": {"class": "DeepseekV3MoE"}, "replace": replace}]
    load_fails("q4_k takes matrices whose inputs are a multiple of 256, not 64", own(), rules=rules)


def test_a_broken_generation_config(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was loaded"))
    folder = own()
    for text, said in (
        ("{", "generation_config.json is not valid JSON"),
        ('{"max_new_tokens": -1}', "is no valid generation config: .*max_new_tokens"),
        ('{"eos_token_id": []}', r"generation_config.json has the eos_token_id \[\], which"),
    ):
        (folder / "generation_config.json").write_text(text)
        load_fails(said, folder)


def test_tokenizers(own: Own, tmp_path: Path) -> None:
    folder = own()
    with pytest.raises(PykernelsError, match="neither tokenizer.json nor tokenizer.model"):
        model.load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(PykernelsError, match="The tokenizer of .* cannot be read") as raised:
        model.load_tokenizer(folder)
    assert "\n" not in str(raised.value)
    with pytest.raises(PykernelsError, match="There is no folder"):
        model.load_tokenizer(tmp_path / "absent")
