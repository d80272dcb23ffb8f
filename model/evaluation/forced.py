"""A given text through an engine: its first part as a prompt, the rest as if the model wrote it.

Whatever the model would have drawn, the text's own token comes next, as a constraint lets nothing
else come; the log-probabilities are those of the logits without it. So the steps are those of a
request, prompts and decode steps alike, and what is measured is what a request would have got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engine import SamplingParams

from ..llm import LLM


@dataclass(frozen=True)
class Forced:
    """A ``Constraint``: these tokens, in this order, and then any."""

    tokens: Sequence[int]

    def begin(self) -> _Next:
        """The filter of one output."""
        return _Next(self.tokens)


class _Next:
    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at = tokens, 0

    def allowed(self, mask: NDArray[np.int32]) -> None:
        if self._at == len(self._tokens):
            mask[:] = -1
            return
        word, bit = divmod(self._tokens[self._at], 32)
        mask.view(np.uint32)[word] |= np.uint32(1 << bit)

    def accept(self, token: int) -> None:
        self._at += 1


def score(
    llm: LLM,
    documents: Sequence[Sequence[int]],
    prompt: int,
    start: int = 1,
    at_once: bool = False,
) -> NDArray[np.float64]:
    """Natural log-probabilities of documents' tokens behind those before them.

    Args:
        documents: D texts of L token ids each.
        prompt: tokens of each that are read as a prompt; the others are written.
        start: first position that is scored; 1: all but the first. What lies before may come from
            the cache.
        at_once: all documents side by side, else one after another.

    Returns:
        float64 [D, L - start]
    """
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=len(document) - prompt,
            ignore_eos=True,
            logprobs=0,
            logprob_start=start if start < prompt else None,
            constraint=Forced(document[prompt:]),
        )
        for document in documents
    ]
    prompts = [document[:prompt] for document in documents]
    if at_once:
        results = llm.engine.generate(prompts, params)
    else:
        pairs = zip(prompts, params, strict=True)
        results = [llm.engine.generate([each], how)[0] for each, how in pairs]
    scores = []
    for document, result in zip(documents, results, strict=True):
        [output] = result.completions
        assert list(output.token_ids) == list(document[prompt:])
        scores.append([token.logprob for token in (*output.prompt_logprobs, *output.logprobs)])
    return np.array(scores, np.float64)
