"""`pykernels eval lossless`: forced text has a plain forward's likelihood; ways are told apart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch

import model
from model.evaluation.forced import score
from model.evaluation.lossless import Row

from ..conftest import Run

TEXT = "def mean(xs):\n    return sum(xs) / len(xs)\n\n\nclass Stack:\n    def push(self, x):\n"


def test_forced_text_has_the_likelihood_of_transformers() -> None:
    with model.load_engine(
        model.EMBEDDED, device="ref", max_model_len=64, max_num_seqs=2, max_num_logits=64
    ) as llm:
        ids = llm.encode(TEXT)
        found = score(llm, [ids, ids], prompt=len(ids) // 2, at_once=True)
    lm = model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32")
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0, :-1].double()
    truth = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found, np.stack([truth] * 2), atol=1e-3)


def test_ways_that_must_not_change_the_model_do_not(run: Run) -> None:
    result = run("eval", "lossless", "--tokens", "300", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["preemption"]["shown"] and rows["prefix cache"]["shown"]
    assert rows["requests side by side"]["rms"] < found["allowed"]
    assert rows["2 experts deferred"]["rms"] > found["allowed"], "another model is seen as one"


def test_another_model_and_an_idle_pass_are_not_right() -> None:
    row = Row("a pass", lossless=True, within=True, shown="at work")
    assert row.right and replace(row, lossless=False, within=False).right
    assert not replace(row, within=False).right and not replace(row, shown="").right
