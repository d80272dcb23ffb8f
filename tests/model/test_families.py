"""What real checkpoints of a family hold: their names, and gpt-oss' experts in MXFP4."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model
from model.architectures.families import why_not
from model.checkpoint.config import read_config
from model.modules.moe import routed_experts
from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from runtime.engine import Engine, SamplingParams

from ..runners import ref_runner
from . import tiny
from .checks import Checkpoints, Tensors, change_config, change_tensors, errors, logits


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_names_are_those_that_transformers_writes(
    checkpoint: Checkpoints, architecture: str, tmp_path: Path
) -> None:
    made = checkpoint(architecture)
    made.reference.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(made.stored)


def as_mxfp4(tensors: Tensors, state: Tensors) -> None:
    """Stores the experts of gpt-oss as the hub does, and puts their values into a state dict."""
    fmt = get_format("mxfp4")
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        weights = [fmt.quantize(each) for each in tensors.pop(name).float().mT]  # [N, K]
        codes = torch.stack([weight.data for weight in weights])
        E, N, K = codes.shape
        both = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = both.view(E, N, K // 32, 16)
        tensors[f"{name}_scales"] = torch.stack([weight.scale for weight in weights])
        state[name].copy_(torch.stack([fmt.dequantize(weight) for weight in weights]).mT)


def test_minimax_m2_turns_the_part_that_its_release_names(tmp_path: Path) -> None:
    config = {"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).rope_parameters["partial_rotary_factor"] == 0.5


def test_gpt_oss_keeps_its_mxfp4(tmp_path: Path, ids: torch.Tensor) -> None:
    made = tiny.make(tmp_path, "gpt_oss", shards=1)
    change_tensors(tmp_path, lambda tensors: as_mxfp4(tensors, made.reference.state_dict()))
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    lm = model.from_pretrained(tmp_path, dtype="float32")
    assert {routed.weights.fmt.name for routed in routed_experts(lm)} == {"mxfp4"}
    truth = logits(made.reference, ids)
    assert errors(logits(lm, ids), truth).median() < 5e-3
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        engine = Engine(ref_runner(llm.runner.model, 64), threaded=False)
        (found,) = engine.generate([ids[0].tolist()], params)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = made.reference.generate(ids[:1], **options)[0, ids.shape[1] :]
    assert list(found.token_ids) == want.tolist()


REASONS = {
    "clipped": ("olmoe", {"clip_qkv": 8.0}, "no lowering of clipped queries"),
    "frequencies of its own": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "no lowering of the rope_type dynamic",
    ),
    "another activation": ("llama", {"hidden_act": "gelu"}, "no kernel for the hidden_act gelu"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_is_not_lowered_says_why(case: str) -> None:
    family, settings, reason = REASONS[case]
    found = why_not(tiny.build(family, **settings).config)
    assert found is not None and reason in found


def test_experts_that_are_normed_together_are_not_deferred(checkpoint: Checkpoints) -> None:
    made = checkpoint("gemma4_text")
    with pytest.raises(PykernelsError, match="gemma4_text' norms what a token's experts give"):
        model.load_engine(made.path, max_model_len=64, device="ref", defer=1)
    with model.load_engine(made.path, max_model_len=64, device="ref", defer="auto") as llm:
        assert llm.runner.deferred == 0


TOWERS = {
    "qwen3_5_moe": {
        "model.visual.blocks.0.norm1.weight": "vision tower is left out",
        "mtp.norm.weight": "multi-token prediction are left out",
    },
    "gemma4": {
        "model.vision_tower.patch_embedder.input_proj.weight": "encoders of images and sounds",
        "model.embed_audio.embedding_projection.weight": "encoders of images and sounds",
    },
}
HEADS = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.parametrize(
    ("kind", "fp8"), [("qwen3_5_moe", False), ("qwen3_5_moe", True), ("gemma4", False)]
)
def test_the_text_part_of_a_multimodal_model_runs(
    kind: str, fp8: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Under the names and with the configuration that the hub has."""
    made = tiny.make(tmp_path, f"{kind}_text", shards=1, fp8=fp8, **(HEADS if fp8 else {}))

    def as_the_hub(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            inner = name.removeprefix("model.")
            tensors[f"model.language_model.{inner}"] = tensors.pop(name)
        tensors |= {name: torch.ones(8) for name in TOWERS[kind]}

    change_tensors(tmp_path, as_the_hub)
    text = json.loads((tmp_path / "config.json").read_text())
    quantization = text.pop("quantization_config", None)
    whole = {"model_type": kind, "text_config": text, "vision_config": {"depth": 1}}
    if fp8:
        left = ["lm_head", "model.visual.blocks.0.norm1", "model.language_model.layers.0.mlp.gate"]
        whole["quantization_config"] = {**quantization, "modules_to_not_convert": left}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    prompt = list(range(2, 40))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        ((found,),) = (each.completions for each in llm.engine.generate([prompt], params))
    notes = [str(each.message) for each in recwarn]
    for part in TOWERS[kind].values():
        assert sum(part in note for note in notes) == 1
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = made.reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    assert list(found.token_ids) == want.tolist()
