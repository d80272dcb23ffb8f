"""Bad input, by name: one line with the cause and the hint, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.checkpoint.tensors.safetensors import Checkpoint
from pykernels.errors import PykernelsError

from ..checks import Own, Tensors, change_config, change_tensors, drop, fused_moe, put, refused

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = f"{EXPERT}_scale_inv"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was loaded"))


def plain(name: str, dtype: torch.dtype = torch.float64) -> Callable[[Tensors], object]:
    """Stores a tensor in that dtype, without scales."""
    one = torch.ones(1).to(dtype)
    return lambda t: (t.pop(f"{name}_scale_inv"), t.update({name: one.expand(t[name].shape)}))


# fmt: off
TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a missing expert": (drop(EXPERT), rf"1 tensors are missing in .*: {EXPERT}"),
    "a missing scale": (drop(SCALE), f"1 tensors are missing in .*: {SCALE}"),
    "a tensor of no module": (
        put("model.layers.7.mlp.up_proj.weight", torch.ones(1)),
        "has 1 tensors that the model has no place for: model.layers.7.mlp.up_proj.weight"),
    "an expert under two names": (
        put(EXPERT.replace("up_proj", "w3"), torch.ones(1)),
        rf"{EXPERT} and \S+w3.weight are two names of one|\S+w3.weight and {EXPERT} are two"),
    "an expert of a wrong shape": (
        put(EXPERT, torch.ones(128, 128).to(torch.float8_e4m3fn)),
        rf"{EXPERT} has the shape \[128, 128\], the model needs \[128, 256\]"),
    "scales of a wrong shape": (
        put(SCALE, torch.ones(1, 1)), rf"{SCALE} is F32 \[1, 1\], {EXPERT} needs F32 \[1, 2\]"),
    "scales of a wrong dtype": (
        put(SCALE, torch.ones(1, 2, dtype=torch.int32)), rf"{SCALE} is I32 \[1, 2\]"),
    "an expert of a wrong dtype": (
        put(EXPERT, torch.ones(128, 256).to(torch.float8_e5m2)),
        f"{EXPERT} is F8_E5M2, experts can be BF16, F16, F32, F8_E4M3 or I8"),
    "a dense tensor in float64": (
        plain(O_PROJ), f"{O_PROJ} is F64, the model .* Store it as float32"),
    "one expert in another format": (
        plain(EXPERT, torch.bfloat16),
        "The experts of model.layers.1.mlp.experts are partly bf16 and partly fp8"),
}
# fmt: on


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(own: Own, no_reads: None, name: str) -> None:
    folder = own("deepseek_v3", fp8=True, shards=1)
    change, message = TENSORS[name]
    change_tensors(folder, change)
    refused(message, folder)


def test_fp8_blocks_of_both_gate_and_up_rows(own: Own, no_reads: None) -> None:
    folder = own("deepseek_v3", shards=1, hidden_size=128, moe_intermediate_size=192)
    base = "model.layers.1.mlp.experts."
    fused = {
        f"{base}gate_up_proj": torch.zeros(8, 384, 128).to(torch.float8_e4m3fn),
        f"{base}gate_up_proj_scale_inv": torch.ones(8, 3, 1),
        f"{base}down_proj": torch.zeros(8, 128, 192).to(torch.float8_e4m3fn),
        f"{base}down_proj_scale_inv": torch.ones(8, 1, 2),
    }
    change_tensors(folder, lambda tensors: tensors.update(fused))
    refused("FP8 blocks that hold both gate and up rows", folder)


TO_BF16 = [fused_moe("DeepseekV3MoE", format="bf16")]
NAN = [
    ("dense", "scale", None),
    ("expert", "code", None),
    ("expert", "scale", []),
    ("expert", "code", TO_BF16),
]


@pytest.mark.parametrize(("kind", "part", "rules"), NAN)
def test_fp8_values_and_scales_that_are_nan(own: Own, kind: str, part: str, rules: Any) -> None:
    folder = own("deepseek_v3", fp8=True, shards=1)
    name = O_PROJ if kind == "dense" else EXPERT

    def spoil(tensors: Tensors) -> None:
        if part == "scale":
            tensors[f"{name}_scale_inv"][0, 0] = torch.nan
        else:
            tensors[name].view(torch.uint8)[0, 0] = 0x7F

    change_tensors(folder, spoil)
    packed = kind == "expert" and rules is None
    cause = r"model.layers.1.mlp.experts.3: expert 3's up_proj" if packed else name
    refused(f"{cause} has .*NaN.* Check the checkpoint", folder, rules=rules)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = [
    NORM,
    EMBEDDING,
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.experts.3.up_proj.weight",
    "model.layers.0.self_attn.q_proj.bias",
    O_PROJ,
]


@pytest.mark.parametrize("name", FLOATS)
def test_floats_that_are_nan_or_infinite(own: Own, name: str) -> None:
    folder = own("qwen2_moe", shards=1)
    change_tensors(folder, lambda t: t[name].view(-1)[5].fill_(torch.nan))
    refused(f"{name} holds NaN. Check the checkpoint", folder)
    change_tensors(folder, lambda t: t[name].view(-1)[5].fill_(-torch.inf))
    with pytest.raises(PykernelsError, match=f"{name} holds infinities. Check the checkpoint"):
        model.load_engine(folder, threads=1)


def test_a_bias_that_takes_an_expert_out(own: Own) -> None:
    """-inf beside a score is no mistake."""
    folder, name = own("deepseek_v3", shards=1), "model.layers.1.mlp.gate.e_score_correction_bias"
    change_tensors(folder, lambda t: t[name][3].fill_(-torch.inf))
    lm = model.from_pretrained(folder, rules=[])
    assert lm.get_buffer(name)[3] == -torch.inf


TIES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "another tensor": (lambda e: -e, f"config ties {HEAD} to .*, the checkpoint stores two diff"),
    "NaN": (lambda e: e.fill_(torch.nan).clone(), f"{HEAD} holds NaN. Download the checkpoint"),
}


@pytest.mark.parametrize("name", TIES)
def test_tied_tensors_that_differ(own: Own, name: str) -> None:
    folder = own("mixtral", shards=1, tie_word_embeddings=True)
    make, message = TIES[name]
    change_tensors(folder, lambda t: t.update({HEAD: make(t[EMBEDDING])}))
    refused(message, folder)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# fmt: off
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "hal9000"}, "'hal9000' is not known to .*. Use .* mixtral"),
    ({"model_type": None}, "has no model_type"),
    ({"quantization_config": {"quant_method": "eetq"}}, "quantized with quant_method 'eetq'"),
    ({"quantization_config": {**FP8, "activation_scheme": "static"}}, "activation_scheme 'static'"),
    ({"quantization_config": {**FP8, "weight_block_size": [64, 64]}}, r"weight_block_size \[64"),
    ({"quantization_config": {"quant_method": ["fp8"]}}, r"quantized with quant_method \['fp8'\]"),
    ({"quantization_config": "yes"}, "with quant_method 'yes'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'. no kernel has: it is silu"),
    ({"n_group": 3}, r"of 3 groups \(n_group\), which cannot be"),
    ({"topk_group": 5}, r"5 \(topk_group\) of 4 groups"),
    ({"topk_group": 1}, "token to 3 of 8 experts, in 1 "),
    ({"num_nextn_predict_layers": 10**9}, "has 1000000000 num_nextn_predict_layers beside 3 lay"),
    ({"max_position_embeddings": 0}, "max_position_embeddings 0, which no model runs with"),
    ({"num_hidden_layers": 10**30}, r"num_hidden_layers 10{30}, which no model runs with"),
    ({"n_routed_experts": 10**9}, "n_routed_experts 1000000000, which no model runs with"),
    ({"rms_norm_eps": float("nan")}, "config.json is not valid JSON: it holds NaN"),
    ({"hidden_size": "big"}, "is no valid deepseek_v3 configuration"),
    ({"num_key_value_heads": 1}, "num_key_value_heads 1, which no .* Set it to 4, as the heads"),
    ({"return_dict": False}, "return_dict False, .* Set it to true"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder True, .* Set it to false"),
    ({"eos_token_id": []}, r"eos_token_id \[\], .* or null for none"),
    ({"eos_token_id": ["x"]}, r"eos_token_id \['x'\], .*null|no valid deepseek_v3"),
    ({"dtype": "int8"}, "dtype .*int8 cannot be used|no valid deepseek_v3"),
]
# fmt: on


@pytest.mark.parametrize(("values", "message"), CONFIGS, ids=[str(row[0]) for row in CONFIGS])
def test_configs(own: Own, values: dict[str, Any], message: str) -> None:
    folder = own("deepseek_v3")
    change_config(folder, **values)
    refused(message, folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": None}, "layer_types None, .* Set it to conv or full_attention for each"),
        ({"layer_types": ["linear_attention"] * 4}, r"layer_types \['linear_attention'"),
        ({"conv_L_cache": 1}, "conv_L_cache 1, which no model runs with"),
        ({"conv_L_cache": 4}, r"conv.conv.weight has the shape \[64, 1, 3\], the model needs"),
    ],
)
def test_short_convolutions(own: Own, values: dict[str, Any], message: str) -> None:
    folder = own("lfm2_moe")
    change_config(folder, **values)
    refused(message, folder)


def test_a_router_of_deepseek_v2_that_is_not_known(own: Own) -> None:
    folder = own("deepseek_v2")
    change_config(folder, topk_method="noaux_tc")
    refused("topk_method 'noaux_tc', .* one of greedy, group_limited_greedy", folder)
    change_config(folder, topk_method="greedy", n_group=None, topk_group=None)
    model.from_pretrained(folder)  # greedy routing has no groups


GENERATION = "generation_config.json"
FILES: list[tuple[str, str | None, str]] = [
    ("config.json", None, "config.json is missing"),
    ("config.json", '{"model_type": ', "config.json is not valid JSON"),
    (GENERATION, "{", "generation_config.json is not valid JSON"),
    (GENERATION, '{"max_new_tokens": -1}', "no valid generation config: .*max_new_tokens"),
    *(
        (
            GENERATION,
            f'{{"eos_token_id": {value}}}',
            r"generation_config.json has the eos_token_id ",
        )
        for value in ("[]", '"x"', '{"a": 1}', '["x"]', "1.5", "true")
    ),
]


@pytest.mark.parametrize(("name", "text", "message"), FILES)
def test_files(own: Own, no_reads: None, name: str, text: str | None, message: str) -> None:
    file = own() / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    refused(message, file.parent)


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused("config.json cannot be read", tmp_path)


Q4_K = [fused_moe("DeepseekV3MoE", format="q4_k")]
# fmt: off
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"device": "nonsense"}, "no device 'nonsense'. Use cpu, or cuda:0 for the first GPU"),
    ({"device": "cuda:3"}, "runs on the CPU, not on cuda:3. Use load_engine"),
    ({"dtype": "int4"}, "The dtype int4 cannot be used"),
    ({"kernel": "no.such"}, "no.such"),
    ({"threads": 100_000}, "threads"),
    ({"numa": 99}, "--numa 99 was asked for"),
    ({"rules": Q4_K}, "q4_k takes matrices whose inputs are a multiple of 256, not 64"),
]
# fmt: on


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(o) for o, _ in OPTIONS])
def test_options(own: Own, no_reads: None, options: dict[str, Any], message: str) -> None:
    refused(message, own(), **options)


PATHS: dict[str, tuple[str, dict[str, bytes], str]] = {
    "an empty folder": ("", {}, "is no checkpoint: there is no config.json and no GGUF file in it"),
    "its config": ("config.json", {"config.json": b"{}"}, "one file of a checkpoint. Give its fo"),
    "its weights": (
        "a.safetensors",
        {"config.json": b"", "a.safetensors": b""},
        "one file of a ch",
    ),
    "no config": ("", {"model.safetensors": b""}, "config.json is missing. Download it too"),
    "Git LFS": (
        "",
        {"config.json": b"{}", "tokenizer.json": b"version https://git-lfs.github.com/spec/v1\n"},
        "tokenizer.json is a pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_is_no_model(case: str, tmp_path: Path) -> None:
    name, files, message = PATHS[case]
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    refused(message, tmp_path / name)


def test_no_folder(tmp_path: Path) -> None:
    refused("There is no folder .*absent. Give the folder", tmp_path / "absent")
    with pytest.raises(PykernelsError, match="There is no folder"):
        model.load_tokenizer(tmp_path / "absent")


def test_tokenizers(own: Own) -> None:
    folder = own()
    with pytest.raises(PykernelsError, match="no tokenizer.json, tokenizer.model, tiktoken"):
        model.load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(PykernelsError, match="The tokenizer of .* cannot be read") as raised:
        model.load_tokenizer(folder)
    assert "\n" not in str(raised.value)
