"""Which experts each token used, against transformers' own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model

from . import tiny
from .routers import check_routed, of_transformers

PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, 96, 70)]


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("qwen2_moe", {}),
        ("deepseek_v3", {"device": "ref", "dual_batch": True, "prefill": "stream"}),
        ("qwen2_moe", {"device": "ref", "expert_cache": 3}),
    ],
)
def test_experts_are_those_of_transformers(
    family: str, where: dict[str, Any], tmp_path: Path
) -> None:
    """In prompts of several chunks, beside another request, behind a cached prefix."""
    made = tiny.make(tmp_path, family)
    settings: Any = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "n": 2}
    with model.load_engine(
        tmp_path, kernel="generic", max_num_batched_tokens=32, max_num_seqs=4, **where
    ) as llm:
        other = llm.submit(PROMPT[::-1], temperature=0, max_tokens=20)
        result = llm.generate(PROMPT, routed_experts=True, **settings)
        again = llm.generate(PROMPT, routed_experts=True, **settings)
        assert other.result().completions[0].routed_experts is None
        layers = llm.runner.routed_layers
    truth = of_transformers(made.reference, [*PROMPT, *result.token_ids])
    assert [layer.layer for layer in layers] == [3 - truth.shape[1] + i for i in range(len(layers))]
    assert {layer.experts for layer in layers} == {8}
    completions = *result.completions, *again.completions
    check_routed((completion, truth) for completion in completions)
    cached = [completion.stats.cached_tokens for completion in completions]
    assert cached[0] == 0 and cached[-1] == 64
