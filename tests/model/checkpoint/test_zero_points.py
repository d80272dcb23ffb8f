"""Checkpoints of AWQ and GPTQ, and gpt-oss's MXFP4."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import model
from model.checkpoint.quantized import mxfp4
from model.checkpoint.read import stored_weight
from model.checkpoint.tensors.safetensors import Checkpoint, Part
from model.llm import meta_decoder
from model.modules.moe import routed_experts
from pykernels.quant import get_format
from runtime.program.sizes import StepSizes

from .. import tiny_quantized
from ..checks import Checkpoints, Own, change_tensors, drop, refused
from ..tiny import FP8_SIZES

FORMATS = {
    "awq": "int4-zp-g128",
    "awq-g64": "int4-zp",
    "gptq": "int4-zp",
    "gptq-g128": "int4-zp-g128",
    "gptq_v2": "int4-zp",
}
DENSE = "model.layers.0.self_attn.o_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def options(scheme: str) -> dict[str, Any]:
    return {"compressed": scheme, "shards": 1, **FP8_SIZES}


@pytest.mark.parametrize("scheme", FORMATS)
def test_values_are_those_of_the_file(checkpoint: Checkpoints, scheme: str) -> None:
    made = checkpoint("deepseek_v3", **options(scheme))
    got = model.from_pretrained(made.path, rules=[], dtype="float32").state_dict()
    for name, tensor in made.reference.state_dict().items():
        assert torch.equal(got[name], tensor), name
    routed = routed_experts(model.from_pretrained(made.path))[0]
    assert routed.weights.fmt.name == FORMATS[scheme]
    for name, weight in zip(("gate", "up", "down"), routed.weights.unpack(3), strict=True):
        key = f"model.layers.1.mlp.experts.3.{name}_proj.weight"
        value = tiny_quantized.value_of(made.stored, key, scheme)
        assert torch.equal(routed.weights.fmt.dequantize(weight), value)


def change_quantization(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))


def test_dense_matrices_stay_packed(
    checkpoint: Checkpoints,
) -> None:
    made = checkpoint("deepseek_v3", **options("gptq"))
    program = meta_decoder(made.path).lower(StepSizes(8, 8, 8, 1, 1))
    [matrix] = [w for w in program.weights.values() if DENSE in {part.name for part in w.parts}]
    assert matrix.fmt == "int4-zp"


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("kept", [7, 8])
def test_symmetric_zero_points_are_8_under_either_label(own: Own, label: str, kept: int) -> None:
    """ "gptq" stores 7 and "gptq_v2" 8; some writers say the one beside the other."""
    folder = own("deepseek_v3", **options("gptq"))
    change_quantization(folder, sym=True, checkpoint_format=label)
    points = tiny_quantized.words(torch.full((1, 8), kept))
    stored = change_tensors(
        folder, lambda t: [t[name].fill_(points.item()) for name in t if name.endswith(".qzeros")]
    )
    with warnings.catch_warnings(record=True) as told:
        got = model.from_pretrained(folder, rules=[], dtype="float32").get_parameter(DENSE)
    base = DENSE.removesuffix(".weight")
    scale, q = stored[f"{base}.scales"].float(), tiny_quantized.codes(stored[f"{base}.qweight"].T)
    assert torch.equal(got, scale.T.repeat_interleave(32, dim=1) * (q - 8))
    assert any(str(one.message).startswith(str(folder)) for one in told) == (
        (label, kept) in (("gptq", 8), ("gptq_v2", 7))
    )


def permuted(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.g_idx"] = tensors[f"{EXPERT}.g_idx"].flip(0)


BAD = {
    "act-order": ("gptq", permuted, f"{EXPERT}.qweight has its inputs in another order"),
    "no zero points": ("awq", drop(f"{EXPERT}.qzeros"), f"missing in .*{EXPERT}.qzeros"),
    "wide scales": (
        "awq",
        lambda t: t.update({f"{EXPERT}.scales": t[f"{EXPERT}.scales"].float() * 1.001}),
        f"{EXPERT}.scales is float32 with values that float16 does not hold",
    ),
    "shape": (
        "gptq",
        lambda t: t.update({f"{EXPERT}.qzeros": t[f"{EXPERT}.qzeros"][1:]}),
        f"{EXPERT}.qzeros is I32 .* needs I32",
    ),
}


@pytest.mark.parametrize(("scheme", "spoil", "told"), BAD.values(), ids=BAD)
def test_refused_by_name(own: Own, scheme: str, spoil: Any, told: str) -> None:
    folder = own("deepseek_v3", **options(scheme))
    change_tensors(folder, spoil)
    refused(told, folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bits": 8}, "GPTQ with bits 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"dynamic": {"+:.*up_proj": {"bits": 8}}}, "dynamic {'"),
    ],
)
def test_configs_that_are_not_read(own: Own, change: dict[str, Any], told: str) -> None:
    folder = own("deepseek_v3", **options("gptq"))
    change_quantization(folder, **change)
    refused(told, folder)


def test_modules_that_are_left_out(own: Own) -> None:
    folder = own("deepseek_v3", **options("gptq"))
    change_quantization(folder, dynamic={"lm_head": {}, "-:.*gate": {}})  # as Qwen3.5's
    meta_decoder(folder)


@pytest.mark.parametrize("scheme", ["awq", "gptq-g128"])
def test_auto_round_packs_as_either(own: Own, scheme: str) -> None:
    """Its config as Intel's Qwen3-Next has it, in which some modules have 16 bits."""
    folder = own("deepseek_v3", **options(scheme))
    before = model.from_pretrained(folder, rules=[], dtype="float32").state_dict()
    packing = "auto_round:auto_awq" if scheme == "awq" else "auto_round:auto_gptq"
    theirs = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}
    change_quantization(folder, **theirs, extra_config={"lm_head": {"bits": 16}})
    after = model.from_pretrained(folder, rules=[], dtype="float32").state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    change_quantization(folder, extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}})
    refused("AutoRound with bits of model.layers.0.mlp.up_proj 8", folder)


def test_biases_of_zeros_are_left_out(own: Own) -> None:
    folder = own("deepseek_v3", **options("gptq"))
    bias = f"{EXPERT}.bias"
    change_tensors(folder, lambda t: t.update({bias: torch.zeros(128)}))
    model.from_pretrained(folder)
    change_tensors(folder, lambda t: t[bias].fill_(1))
    refused(f"no place for: {bias}", folder)


def test_gpt_oss_experts_are_its_gate_and_up_rows(tmp_path: Path) -> None:
    E, H, I, block = 2, 64, 96, "model.layers.0.mlp.experts"  # noqa: E741
    stored = {}
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        stored[f"{block}.{name}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16)).byte()
        stored[f"{block}.{name}_scales"] = torch.randint(0, 252, (E, N, K // 32)).byte()
    save_file(stored, tmp_path / "model.safetensors")
    fmt = get_format("mxfp4")
    with Checkpoint(tmp_path) as files:
        names: Any = SimpleNamespace(checkpoint=files, companion=lambda key, what: Part(key + what))
        found = mxfp4.find(names, block, E, H, I)
        for e, parts in enumerate(found):
            weights = [stored_weight(files, part) for part in parts]
            for weight, part in zip(weights, parts, strict=True):
                fmt.check(weight, *part.shape)
            gate, up, down = (fmt.dequantize(weight) for weight in weights)
            truth = [
                convert_moe_packed_tensors(  # [E, K, N]
                    stored[f"{block}.{name}_blocks"],
                    stored[f"{block}.{name}_scales"],
                    dtype=torch.float32,
                )[e].T
                for name in ("gate_up_proj", "down_proj")
            ]
            assert torch.equal(gate, truth[0][0::2]) and torch.equal(up, truth[0][1::2])
            assert torch.equal(down, truth[1])
