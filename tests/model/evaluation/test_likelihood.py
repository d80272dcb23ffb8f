"""Continuations scored through the engine: the logprobs of a plain forward."""

from __future__ import annotations

import pytest
import torch

import model
from model.evaluation.likelihood import likelihoods
from pykernels.errors import PykernelsError

CONTEXTS = ("", "def mean(xs):\n    ", "import os\n" * 40 + "def mean(xs):\n    ")
CONTINUATIONS = ("return", "return sum(xs) / len(xs)\n", "pass\n" * 30)


def test_logprobs_are_those_of_transformers() -> None:
    lm = model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32")
    with model.load_engine(model.EMBEDDED, max_model_len=512, max_num_logits=24) as llm:
        bos = [llm.tokenizer.bos_token_id or 0]  # type: ignore[union-attr]
        pairs = [
            (llm.encode(context) if context else bos, llm.encode(continuation))
            for context in CONTEXTS
            for continuation in CONTINUATIONS
        ]
        found = likelihoods(llm, [*pairs, (bos, [])])
        assert llm.engine.stats.cached_tokens > 0, "what begins alike is computed once"
        with pytest.raises(PykernelsError, match="empty context"):
            likelihoods(llm, [([], [5])])
        with pytest.raises(PykernelsError, match="continuation of 512 tokens"):
            likelihoods(llm, [(bos, [5] * 512)])
        with pytest.warns(UserWarning, match="cut"):
            [cut, whole] = likelihoods(llm, [([5] * 600, [6] * 9), ([5] * 503, [6] * 9)])
        assert cut.logprob == pytest.approx(whole.logprob, rel=0.01)
    assert (found[-1].logprob, found[-1].greedy, found[-1].tokens) == (0.0, True, 0)
    for (context, continuation), got in zip(pairs, found, strict=False):
        with torch.no_grad():
            logits = lm(torch.tensor([[*context, *continuation]])).logits[0].double()
        rows = logits[len(context) - 1 : -1]  # [continuation, V]
        each = rows.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        assert got.tokens == len(continuation)
        assert got.logprob == pytest.approx(float(each.sum()), rel=0.02, abs=0.1)
        margin = rows.topk(2).values.diff().abs().min()
        if margin > 0.2:  # no near-tie, which rounding may turn
            assert got.greedy == bool((rows.argmax(-1) == torch.tensor(continuation)).all())
