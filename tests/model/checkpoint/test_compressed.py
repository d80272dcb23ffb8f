"""Quantized checkpoints: DeepSeek's FP8, and compressed-tensors' int4, int8 and FP8."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.checkpoint.config import read_config
from model.checkpoint.tensors.safetensors import Checkpoint, TensorSlice
from model.modules.moe import routed_experts
from pykernels.errors import PykernelsError

from .. import tiny_quantized
from ..checks import Checkpoints, Own, Tensors, change_tensors, drop, errors, logits, put, refused
from ..tiny import FP8_SIZES
from ..tiny_quantized import INT4

SCHEMES = {
    **{name: name for name in INT4},
    "int8-channel": "int8-channel",
    "int8-tensor": "int8-channel",
    "channel": "fp8-channel",
    "tensor": "fp8-channel",
    "block": "fp8",
    "deepseek": "fp8",
    **dict.fromkeys(tiny_quantized.NVFP4, "nvfp4"),
}
"""What is stored, and the weight format that it is loaded in."""
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DENSE = "model.layers.0.mlp.gate_proj.weight"
NORM, FUSED = "model.norm.weight", "model.layers.1.mlp.experts.gate_up_proj"
SCALE, SHAPE = f"{EXPERT}_scale", f"{EXPERT}_shape"


def options(scheme: str) -> dict[str, Any]:
    if scheme == "deepseek":
        return {"fp8": True}
    return {"compressed": scheme, "shards": 1, **FP8_SIZES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_and_logits(checkpoint: Checkpoints, ids: torch.Tensor, scheme: str) -> None:
    made = checkpoint("deepseek_v3", **options(scheme))
    # Without rules everything is dequantized into transformers' own modules, exactly.
    got = model.from_pretrained(made.path, rules=[], dtype="float32").state_dict()
    for name, tensor in made.reference.state_dict().items():
        assert torch.equal(got[name], tensor), name
    lm = model.from_pretrained(made.path, dtype="float32")
    # As in test_load: bf16 inputs and h inside the experts are all that differs.
    assert errors(logits(lm, ids), logits(made.reference, ids)).median() < 5e-3
    # Values and scales of the file are those that are packed.
    routed = routed_experts(lm)[0]
    assert routed.weights.fmt.name == SCHEMES[scheme]
    for name, weight in zip(("gate", "up", "down"), routed.weights.unpack(3), strict=True):
        key = f"model.layers.1.mlp.experts.3.{name}_proj.weight"
        value = tiny_quantized.value_of(made.stored, key)
        assert torch.equal(routed.weights.fmt.dequantize(weight), value)
        if scheme in tiny_quantized.NVFP4:  # the two scales are joined
            continue
        scale = made.stored.get(f"{key}_scale", made.stored.get(f"{key}_scale_inv"))
        assert weight.scale is not None and scale is not None
        assert torch.equal(weight.scale, scale.to(weight.scale.dtype).expand_as(weight.scale))


CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # scheme, of the weights' group, of the whole, what the error names
    ("int4", {"symmetric": False}, {}, "symmetric False"),
    ("int4", {"actorder": "group"}, {}, "actorder 'group'"),
    ("int4", {"group_size": 64}, {}, "group_size 64"),
    ("int4", {"strategy": "tensor"}, {}, "strategy 'tensor'"),
    ("int4", {"num_bits": 8}, {}, "num_bits 8"),
    ("int8-channel", {"strategy": "group"}, {}, "strategy 'group'"),
    ("block", {"block_structure": [64, 64]}, {}, r"block_structure \[64, 64\]"),
    ("nvfp4", {"group_size": 32}, {}, "group_size 32"),
    ("int4", {}, {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized'"),
    ("int4", {}, {"quantization_status": "initialized"}, "quantization_status 'initialized'"),
    ("int4", {}, {"transform_config": {"R1": 1}}, "transform_config"),
    ("int4", {}, {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
    ("int4", {}, {"config_groups": {}}, "config_groups {}"),
    ("int4", {}, {"config_groups": {"group_0": 4}}, "a group 4"),
    ("int4", {}, {"config_groups": {"g": {"weights": 4}}}, "weights 4"),
]


def write_config(folder: Path, scheme: str, weights: dict[str, Any], top: dict[str, Any]) -> None:
    config = copy.deepcopy(tiny_quantized.config(scheme))
    config["config_groups"]["group_0"]["weights"].update(weights)
    whole = {"model_type": "deepseek_v3", "quantization_config": {**config, **top}}
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize(("scheme", "weights", "top", "named"), CONFIGS)
def test_configs_that_cannot_be_read(
    tmp_path: Path, scheme: str, weights: dict[str, Any], top: dict[str, Any], named: str
) -> None:
    write_config(tmp_path, scheme, weights, top)
    message = f"is quantized by compressed-tensors with {named}.*, which cannot be read"
    with pytest.raises(PykernelsError, match=message) as raised:
        read_config(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_configs_that_are_read(tmp_path: Path, actorder: Any) -> None:
    """Those orders keep the inputs in place; some writers leave "frozen" after they compressed."""
    top = {"sparsity_config": {"format": "dense"}, "quantization_status": "frozen"}
    write_config(tmp_path, "int4", {"actorder": actorder}, top)
    assert read_config(tmp_path).model_type == "deepseek_v3"


# fmt: off
TENSORS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "fused int8": (
        "int8-channel", put(FUSED, torch.ones(8, 256, 256).to(torch.int8)),
        r"experts\.gate_up_proj is I8 \[8, 256, 256\], its codes are read"),
    "an FP8 vector": (
        "channel", put(NORM, torch.ones(256).to(torch.float8_e4m3fn)),
        rf"{NORM} is F8_E4M3 \[256\], its"),
    "no int8 scales": ("int8-channel", drop(SCALE), f"1 tensors are missing in .*: {SCALE}"),
    "no int4 scales": ("int4", drop(SCALE), f"1 tensors are missing in .*: {SCALE}"),
    "int8 scales of groups": (
        "int8-channel", put(SCALE, torch.ones(128, 2)),
        rf"{SCALE} is F32 \[128, 2\], {EXPERT} needs F32 \[128, 1\] or \[1\]"),
    "int4 of another matrix": (
        "int4", put(f"{EXPERT}_packed", torch.zeros(128, 16, dtype=torch.int32)),
        r"_packed is I32 \[128, 16\], the model's \[128, 256\] needs I32 \[128, 32\]"),
    "scales of other groups": (
        "int4", put(SCALE, torch.ones(128, 4).bfloat16()),
        rf"{SCALE} is BF16 .* needs BF16 \[128, 1\] or \[128, 2\] or \[128, 8\]"),
    "float32 scales of groups": (
        "int4", put(SCALE, torch.ones(128, 8)), rf"{SCALE} is F32 \[128, 8\], .* needs BF16"),
    "calibrated, not compressed": (
        "channel", put(EXPERT, torch.ones(128, 256).bfloat16()),
        f"{EXPERT} is BF16 and has a scale: it was calibrated but never made codes of"),
    "int4 of another shape": (
        "int4", put(SHAPE, torch.tensor([128, 255])),
        rf"{SHAPE} is \[128, 255\], {EXPERT}_packed is for the model's \[128, 256\]"),
    "one expert in other groups": (
        "int4", put(SCALE, torch.ones(128, 2).bfloat16()), "are partly int4 and partly int4-g128"),
    "no second scale": (
        "nvfp4", drop(f"{EXPERT}_global_scale"), f"1 tensors are missing.*: {EXPERT}_global_scale"),
    "no second scale of ModelOpt's": (
        "modelopt", drop(f"{EXPERT}_scale_2"), f"1 tensors are missing in .*: {EXPERT}_scale_2"),
    "NVFP4 scales of groups of 32": (
        "modelopt", put(SCALE, torch.ones(128, 8).to(torch.float8_e4m3fn)),
        rf"{SCALE} is F8_E4M3 \[128, 8\], .* in NVFP4 needs F8_E4M3 \[128, 16\]"),
    "zero points": (
        "int4", put(f"{EXPERT}_zero_point", torch.ones(1)), f"no place for: {EXPERT}_zero_point"),
}
# fmt: on


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors(own: Own, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scheme, change, message = TENSORS[name]
    folder = own("deepseek_v3", **options(scheme))
    change_tensors(folder, change)
    read = Checkpoint.read

    def only_shapes(files: Checkpoint, part: TensorSlice) -> torch.Tensor:
        assert part.name.endswith(("_shape", "_zero_point")), "something was loaded"
        return read(files, part)

    monkeypatch.setattr(Checkpoint, "read", only_shapes)
    refused(message, folder)


KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def test_scales_of_what_stays_bfloat16_are_left_out(own: Own) -> None:
    """As llm-compressor stores static activations, and keys and values in FP8."""
    folder = own("deepseek_v3", **options("tensor"))
    want = model.from_pretrained(folder, rules=[]).get_parameter(DENSE)
    attention, layer = "model.layers.0.self_attn", DENSE.removesuffix(".weight")
    extra = [f"{attention}.k_scale", f"{attention}.v_scale", f"{layer}.input_zero_point"]
    extra.append(f"{layer}.weight_zero_point")  # of symmetric weights
    change_tensors(folder, lambda t: t.update({name: torch.zeros(1) for name in extra}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = KV_FP8
    (folder / "config.json").write_text(json.dumps(config))
    with (
        pytest.warns(UserWarning, match="static scales of activations are left out"),
        pytest.warns(UserWarning, match="scales for keys and values in FP8 are left out"),
    ):
        got = model.from_pretrained(folder, rules=[]).get_parameter(DENSE)
    assert torch.equal(got, want)


def test_int4_scales_per_output_are_any_floats(own: Own) -> None:
    folder = own("deepseek_v3", **options("int4-channel"))
    stored = change_tensors(folder, lambda t: t.update({SCALE: t[SCALE].half() * 1.001}))
    routed = routed_experts(model.from_pretrained(folder))[0]
    _, up, _ = routed.weights.unpack(3)
    assert routed.weights.fmt.name == "int4-channel"
    assert torch.equal(up.scale, stored[SCALE].float())


def float16_scales(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = (tensors[name].float() * 1.001).half()


@pytest.mark.parametrize("scheme", ["int4", "int4-g128"])
def test_int4_with_float16_scales_becomes_q4_0_exactly(own: Own, scheme: str) -> None:
    folder = own("deepseek_v3", **{**options(scheme), "moe_intermediate_size": 256})
    tensors = change_tensors(folder, float16_scales)
    lm = model.from_pretrained(folder, dtype="float32")
    assert torch.equal(lm.get_parameter(DENSE), tiny_quantized.value_of(tensors, DENSE))
    routed = routed_experts(lm)[0]
    assert routed.weights.fmt.name == "q4_0"
    for e in range(8):
        for proj, weight in zip(("gate", "up", "down"), routed.weights.unpack(e), strict=True):
            key = f"model.layers.1.mlp.experts.{e}.{proj}_proj.weight"
            want = tiny_quantized.value_of(tensors, key)
            assert torch.equal(routed.weights.fmt.dequantize(weight), want)


def test_float16_scales_that_are_infinite_are_refused(own: Own) -> None:
    folder = own("deepseek_v3", **options("int4"))
    change_tensors(folder, float16_scales)
    change_tensors(folder, lambda t: t[f"{EXPERT}_scale"].fill_(torch.inf))
    refused(f"{EXPERT}_packed has scales that are NaN or infinite", folder)
