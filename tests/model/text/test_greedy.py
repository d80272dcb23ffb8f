"""The shipped model, injected, against transformers' own model on its dequantized weights.

The truth is transformers' float32 model. With a float32 trunk ours must give the same 64 tokens. In
bfloat16 even transformers differs from its own float32 where two tokens are almost equally likely;
there, and only there, may ours.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import model
from model.modules.moe import routed_experts

NEW = 64
PROMPTS = (
    "def quicksort(xs):",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):",
    "for i in range(10):\n    ",
    "    raise ValueError(",
    "try:\n    import json\nexcept",
)
KERNELS = ("auto", "generic")
TIE = 0.1
"""Logits: below this lead of one token over another, bfloat16's own error (0.2) decides."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return model.load_tokenizer(model.EMBEDDED)


@pytest.fixture(scope="module")
def truth() -> PreTrainedModel:
    return model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32")


@pytest.fixture(scope="module")
def texts(truth: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    return {prompt: greedy(truth, tokenizer, prompt) for prompt in PROMPTS}


def greedy(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Prompt and continuation."""
    inputs = tokenizer(prompt, return_tensors="pt")
    found: list[int] = lm.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return found


def logits(lm: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return lm(torch.tensor([ids])).logits[0].float()  # [T, vocabulary]


def test_the_truth_writes_something(texts: dict[str, list[int]]) -> None:
    assert len({tuple(ids[-8:]) for ids in texts.values()}) == len(PROMPTS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_tokens_are_identical(
    tokenizer: PreTrainedTokenizerBase, texts: dict[str, list[int]], kernel: str
) -> None:
    lm = model.from_pretrained(model.EMBEDDED, dtype="float32", kernel=kernel)
    assert len(routed_experts(lm)) >= 5
    for prompt, want in texts.items():
        assert greedy(lm, tokenizer, prompt) == want, prompt


@pytest.mark.parametrize("kernel", KERNELS)
def test_in_bfloat16_only_ties_may_fall_otherwise(
    truth: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[str, list[int]],
    kernel: str,
) -> None:
    lm = model.from_pretrained(model.EMBEDDED, kernel=kernel)
    same = 0
    for prompt, want in texts.items():
        got = greedy(lm, tokenizer, prompt)
        if got == want:
            same += 1
            continue
        split = next(i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
        scores = logits(truth, want[:split])[-1]
        assert scores[want[split]] - scores[got[split]] < TIE, (prompt, split)
    assert same >= len(PROMPTS) // 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_are_within_bfloat16s_own_error(
    truth: PreTrainedModel, texts: dict[str, list[int]], kernel: str
) -> None:
    ours = model.from_pretrained(model.EMBEDDED, kernel=kernel)
    theirs = model.from_pretrained(model.EMBEDDED, rules=[])

    def error(lm: PreTrainedModel) -> torch.Tensor:
        """The median over all tokens: a flipped expert puts single tokens off in either model."""
        off = [(logits(lm, ids) - logits(truth, ids)).norm(dim=-1) for ids in texts.values()]
        return torch.cat(off).median()

    assert error(ours) < 1.2 * error(theirs)
