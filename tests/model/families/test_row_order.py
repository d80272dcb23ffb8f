"""Matrices whose rows are put into another order while they are loaded, in the formats that they
are stored in: of gated delta nets, and of queries with gates beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..checks import Checkpoints
from .test_logprobs import GAINS, MEDIAN
from .test_replaced import llm_at, median_error

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "intermediate_size": 320,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 256,
}
"""Heads of whole FP8 blocks, as the real ones are."""
LONG: dict[str, Any] = {"max_position_embeddings": 256}
STORED = {
    "deepseek": ("fp8", WIDE),
    "channel": ("fp8-channel", LONG),
    "int8-channel": ("int8-channel", LONG),
    "int4": ("int4", LONG),
    "awq": ("int4-zp-g128", WIDE),
    "gptq": ("int4-zp", LONG),
}


@pytest.mark.parametrize("scheme", STORED)
def test_rows_take_their_scales_with_them(scheme: str, checkpoint: Checkpoints) -> None:
    fmt, sizes = STORED[scheme]
    how: Any = {"fp8": True} if scheme == "deepseek" else {"compressed": scheme}
    made = checkpoint("qwen3_next", gains=GAINS, **how, **sizes)
    prompt = torch.randint(2, 96, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    with llm_at("ref", made.path) as llm:
        weights = llm.runner.model.lower().weights
        assert median_error(llm, made.reference, prompt) <= MEDIAN
    assert {weights[name].fmt for name in weights if ".qkv" in name or ".q+gate" in name} == {fmt}
