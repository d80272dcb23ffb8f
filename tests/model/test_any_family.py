"""Decoder-only MoE models of families that nobody has lowered or written rules for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import model
from model.architectures.families import why_not
from model.modules.moe import FusedExperts
from pykernels.errors import PykernelsError

from . import tiny
from .checks import errors, logits

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phimoe": {"num_local_experts": 4},  # a sparse mixer, layer norms
    "granitemoe": {"num_local_experts": 4},  # fused tensors under names of its own
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},  # a shared MLP
}


def make(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    """As transformers itself stores it: under the names of real checkpoints."""
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES.get(family, {}), **changes})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tiny.randomize(made, 0)
    made.to(torch.bfloat16).save_pretrained(folder)
    return made.float()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_runs_eagerly_with_our_experts(family: str, tmp_path: Path, ids: torch.Tensor) -> None:
    made = make(tmp_path, family)
    lm = model.from_pretrained(tmp_path, dtype="float32")
    assert sum(isinstance(module, FusedExperts) for module in lm.modules()) == 2
    assert errors(logits(lm, ids), logits(made, ids)).median() < 5e-3
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(lm.generate(ids, **options), made.generate(ids, **options))
    assert why_not(lm.config) == f"there is no lowering of {family}, only of " + ", ".join(
        model.architectures.families.FAMILIES
    )


NOT_KNOWN = "experts has experts of a layout that is not known"
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": ("qwen3", {}, "none of its modules is called experts"),
    "another layout": ("jetmoe", {"num_local_experts": 4}, NOT_KNOWN),
    "no gate": (
        "phimoe",
        {"hidden_act": "gelu"},
        "mlp.experts has experts whose gate .hidden_act 'gelu'",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_recognised_is_one_line(case: str, tmp_path: Path) -> None:
    family, changes, reason = OTHERS[case]
    make(tmp_path, family, **changes)
    with pytest.raises(PykernelsError, match=f"{family} has no routed experts .*{reason}") as said:
        model.from_pretrained(tmp_path)
    assert "\n" not in str(said.value)
