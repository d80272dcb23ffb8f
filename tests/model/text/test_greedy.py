"""The shipped model, injected, against transformers' own model on its dequantized weights.

The reference is transformers' float32 model. With a float32 trunk ours gives the same tokens. In
bfloat16 our logits are as near to it as transformers' own in bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import model
from model.modules.moe import routed_experts

from ..checks import logits

NEW = 16
PROMPTS = ("def quicksort(xs):", "class Stack:\n    def __init__(self):", "    raise ValueError(")
KERNELS = ("auto", "generic")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return model.load_tokenizer(model.EMBEDDED)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32")


@pytest.fixture(scope="module")
def texts(reference: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    return {prompt: greedy(reference, tokenizer, prompt) for prompt in PROMPTS}


def greedy(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Prompt and continuation."""
    inputs = tokenizer(prompt, return_tensors="pt")
    found: list[int] = lm.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_tokens_are_identical(
    tokenizer: PreTrainedTokenizerBase, texts: dict[str, list[int]], kernel: str
) -> None:
    assert len({tuple(ids[-8:]) for ids in texts.values()}) == len(PROMPTS)
    lm = model.from_pretrained(model.EMBEDDED, dtype="float32", kernel=kernel)
    assert len(routed_experts(lm)) >= 5
    for prompt, want in texts.items():
        assert greedy(lm, tokenizer, prompt) == want, prompt


def test_bfloat16_is_as_good_as_transformers_own(
    reference: PreTrainedModel, texts: dict[str, list[int]]
) -> None:
    rows = [torch.tensor([ids]) for ids in texts.values()]
    want = [logits(reference, ids) for ids in rows]

    def error(**options: Any) -> torch.Tensor:
        """The median over all tokens: a flipped expert puts single tokens off in either model."""
        lm = model.from_pretrained(model.EMBEDDED, **options)
        off = [(logits(lm, ids) - w)[0].norm(dim=-1) for ids, w in zip(rows, want, strict=True)]
        return torch.cat(off).median()

    theirs = error(rules=[])
    for kernel in KERNELS:
        assert error(kernel=kernel) < 1.2 * theirs, kernel
