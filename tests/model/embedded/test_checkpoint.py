"""The shipped files: DeepSeek-V3's FP8 layout, complete, small enough, as the card says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from model.embedded import PATH
from model.embedded.card import render
from model.embedded.export import fused_state, read_tensors

LIMIT = 24 * 2**20


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    found = json.loads((PATH / "config.json").read_text())
    assert found["model_type"] == "deepseek_v3" and found["topk_method"] == "noaux_tc"
    return found


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return read_tensors(PATH)


def test_all_files_together_stay_within_the_limit() -> None:
    assert sum(f.stat().st_size for f in PATH.rglob("*") if f.is_file()) <= LIMIT


def test_no_value_is_nan_or_infinite_and_scales_are_tight(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor.float()).all(), name
        if tensor.dtype == torch.float8_e4m3fn:
            # scale = amax / 448: each tensor's largest code is the format's largest.
            assert tensor.float().abs().max() == 448.0, name
            assert (tensors[name + "_scale_inv"] > 0).all(), name


def test_the_router_biases_were_trained(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        bias = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert bias.std() > 1e-3, layer


def test_it_is_deepseeks_layout_without_a_gap(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**plain))
    expected = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in fused_state(tensors).items()} == expected
    ragged = False
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:  # every linear of a layer, one expert a tensor
            scale = tensors[f"{name}_scale_inv"]
            rows, columns = tensor.shape
            assert scale.dtype == torch.float32
            assert scale.shape == (-(-rows // 128), -(-columns // 128))
            ragged |= rows % 128 != 0
        elif not name.endswith("_scale_inv"):
            assert not name.endswith("proj.weight")
            bias = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
    assert ragged  # as kv_a_proj_with_mqa of DeepSeek-V3 is


def test_the_card_renders_the_committed_figures() -> None:
    assert (PATH / "README.md").read_text() == render(PATH)


def test_no_expert_is_dead_and_none_hoards(config: dict[str, Any]) -> None:
    loads = json.loads((PATH / "evaluation.json").read_text())["load_over_mean"]
    assert len(loads) == config["num_hidden_layers"] - config["first_k_dense_replace"]
    for layer, load in loads.items():
        assert len(load) == config["n_routed_experts"], layer
        assert min(load) > 0.1 and max(load) < 3.0, (layer, min(load), max(load))
