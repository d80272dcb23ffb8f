"""Held-out text through decode programs: the bits of a plain forward, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import model
from model.evaluation.teacher import Teacher

from ..conftest import Run, failed


def test_bits_are_those_of_transformers(tmp_path: Path) -> None:
    text = "def mean(xs):\n    return sum(xs) / len(xs)\n\n\nclass Stack:\n    def push(self, x):\n"
    # AVX-512 and AMX have other tiles for eight rows than for the last lane's one.
    with model.load_engine(model.EMBEDDED, max_model_len=64, kernel="generic") as llm:
        ids = torch.tensor([llm.encode(text)])
        teacher = Teacher(llm, ids.repeat(9, 1))  # two rounds of 8 lanes
        found = teacher.score(teacher.program())
    lm = model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32")
    with torch.no_grad():
        logits = lm(ids).logits[0, :-1].double()
    truth = -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] / math.log(2)
    assert torch.equal(found.bits[0], found.bits[8])
    assert abs(float(found.bits[0].sum() / truth.sum()) - 1) < 0.01
    assert (found.likeliest[0] == logits.argmax(-1)).double().mean() > 0.9


def test_eval_deferral_writes_what_it_prints(run: Run, tmp_path: Path) -> None:
    options = ("--experts", "0,2", "--tokens", "100", "--length", "40", "--out", str(tmp_path))
    printed = json.loads(run("eval", "deferral", "--json", *options).out)
    (numbers,), (page,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    assert json.loads(numbers.read_text()).items() >= printed.items()
    rows = {(row["method"], row["affected"]): row for row in printed["rows"]}
    assert set(rows) == {("none", 0), ("skipping", 2), ("deferral", 2)}
    assert rows["none", 0]["agreement"] == 1 and rows["none", 0]["change"] == 0
    assert rows["skipping", 2]["agreement"] < 1
    assert f"{rows['deferral', 2]['bits_per_byte']:.4f}" in page.read_text()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--experts", "5"), "Use 0 to 4"),
        (("--experts", "x"), "0,1,2"),
        (("--tokens", "900000"), "--tokens"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], hint: str, run: Run) -> None:
    failed(run("eval", "deferral", *options), hint)
