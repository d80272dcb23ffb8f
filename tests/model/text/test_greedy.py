"""The shipped model, injected, against transformers' own float32 model on its values."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import model
from model.modules.moe import routed_experts

from ...cpu.kernels import fastest

PROMPTS = ("def quicksort(xs):", "class Stack:\n    def __init__(self):", "    raise ValueError(")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return model.load_tokenizer(model.EMBEDDED)


def greedy(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Each prompt and its continuation."""
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    return [lm.generate(**each, max_new_tokens=16, do_sample=False)[0].tolist() for each in inputs]


@pytest.fixture(scope="module")
def texts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return greedy(model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32"), tokenizer)


@pytest.mark.parametrize("kernel", [fastest(), "generic"])
def test_the_tokens_are_identical(
    tokenizer: PreTrainedTokenizerBase, texts: list[list[int]], kernel: str
) -> None:
    assert len({tuple(ids[-8:]) for ids in texts}) == len(PROMPTS)
    lm = model.from_pretrained(model.EMBEDDED, dtype="float32", kernel=kernel)
    assert len(routed_experts(lm)) >= 5
    assert greedy(lm, tokenizer) == texts
