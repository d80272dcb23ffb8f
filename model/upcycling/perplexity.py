"""How well a model foretells a short text that was written for this purpose alone."""

from __future__ import annotations

import math
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..evaluation.likelihood import likelihoods
from ..llm import LLM

TEXT = Path(__file__).parent / "heldout.txt"


def perplexity(llm: LLM, tokenizer: PreTrainedTokenizerBase) -> float:
    """Perplexity of the text's tokens but the first."""
    ids: list[int] = tokenizer(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    [likelihood] = likelihoods(llm, [(ids[:1], ids[1:])])
    return math.exp(-likelihood.logprob / likelihood.tokens)
