"""Nothing is made up on the engine's way either: a missing or unexpected tensor is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import model
from pykernels.errors import PykernelsError

from ..checks import Own, Tensors, change_tensors, drop, put

NORM = "model.layers.1.post_attention_layernorm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
CASES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a missing norm": (drop(NORM), f"1 tensors are missing in .*: {NORM}"),
    "a missing bias": (drop(BIAS), f"1 tensors are missing in .*: {BIAS}"),
    "a missing expert": (drop(EXPERT), f"1 tensors are missing in .*: {EXPERT}"),
    "no head": (drop("lm_head.weight"), "1 tensors are missing in .*: lm_head.weight"),
    "an unexpected one": (
        put("model.layers.1.mlp.spare.weight", torch.zeros(2)),
        "has 1 tensors that the model has no place for: model.layers.1.mlp.spare.weight",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_too_few_or_too_many_is_named(own: Own, case: str) -> None:
    change, message = CASES[case]
    folder = own("deepseek_v3", shards=1)
    change_tensors(folder, change)
    with pytest.raises(PykernelsError, match=message):
        model.load_engine(folder, max_model_len=64)


def test_layers_of_multi_token_prediction_are_left_out(own: Own) -> None:
    folder = own("deepseek_v3", shards=1, num_nextn_predict_layers=1)
    with model.load_engine(folder, max_model_len=64, device="ref") as llm:
        want = llm.generate([5, 6, 7], temperature=0, max_tokens=4).token_ids
    extra = ("eh_proj.weight", "shared_head.norm.weight", "mlp.experts.0.up_proj.weight")
    for name in extra:
        change_tensors(folder, put(f"model.layers.3.{name}", torch.zeros(2)))
    with model.load_engine(folder, max_model_len=64, device="ref") as llm:
        assert llm.generate([5, 6, 7], temperature=0, max_tokens=4).token_ids == want
