"""Which experts each token used, against transformers' own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model
from pykernels.errors import PykernelsError
from runtime.engine import RoutedExperts

from . import tiny

PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, 96, 70)]


def of_transformers(lm: Any, tokens: list[int]) -> np.ndarray:
    """[T, L, E]: what each layer multiplies each expert's output by."""
    found: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        _, ids, weights = (*args, *kwargs.values())
        found.append(torch.zeros(len(ids), 8).scatter(1, ids, weights.float()))

    blocks = [layer.mlp.experts for layer in lm.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        lm(torch.tensor([tokens]))
    for one in hooks:
        one.remove()
    return torch.stack(found, 1).numpy()


def spread(routed: RoutedExperts) -> np.ndarray:
    """[N, L, E]"""
    found = np.zeros((*routed.ids.shape[:2], 8), np.float32)
    np.put_along_axis(found, routed.ids.astype(np.int64), routed.weights, 2)
    return found


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_experts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In prompts of several chunks, beside another request, behind a cached prefix."""
    made = tiny.make(tmp_path, family)
    settings: Any = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "n": 2}
    with model.load_engine(
        tmp_path, kernel="generic", max_num_batched_tokens=32, max_num_seqs=4
    ) as llm:
        other = llm.submit(PROMPT[::-1], temperature=0, max_tokens=20)
        result = llm.generate(PROMPT, routed_experts=True, **settings)
        again = llm.generate(PROMPT, routed_experts=True, **settings)
        assert other.result().completions[0].routed_experts is None
        layers = llm.runner.routed_layers
    tokens = [*PROMPT, *result.token_ids]
    truth = of_transformers(made.reference, tokens)
    assert [layer.layer for layer in layers] == [3 - truth.shape[1] + i for i in range(len(layers))]
    assert {layer.experts for layer in layers} == {8}
    cached = []
    for completion in (*result.completions, *again.completions):
        routed = completion.routed_experts
        assert routed is not None and routed.first == completion.stats.cached_tokens
        assert routed.first + len(routed.ids) == len(tokens) - 1  # the last one is drawn only
        cached.append(routed.first)
        ours, theirs = spread(routed), truth[routed.first : len(tokens) - 1]
        same = ((ours != 0) == (theirs != 0)).all(-1)
        assert same.mean() > 0.9  # near-ties may fall otherwise in bfloat16
        assert np.abs(ours - theirs)[same].max() < 0.1 * theirs.max()
    assert cached[0] == 0 and cached[-1] == 64


def test_a_device_that_does_not_tell_refuses(tmp_path: Path) -> None:
    tiny.make(tmp_path, "mixtral")
    with model.load_engine(tmp_path, device="ref") as llm:
        with pytest.raises(PykernelsError, match="does not tell them"):
            llm.generate(PROMPT, routed_experts=True)
