"""`pykernels eval tasks`: our tasks and a folder of somebody's, on questions of this test's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..conftest import Run, failed

pytest.importorskip("lm_eval", reason="lm-eval is an extra: pip install -e '.[eval]'")

CHOICE = {"activity_label": "Sorting", "ctx": "def sort(xs):\n    return", "expected_index": 0}
QUESTIONS = {
    "hellaswag": [
        {**CHOICE, "endings": ["sorted(xs)", "zebra quilt", "!!!!", "Thursday [note] ."]},
        {**CHOICE, "endings": ["xs", "ostrich velvet", "????", "umbrella"]},
    ],
    "truthfulqa_mc1": [{"question": "Is it?", "choices": ["Yes.", "No."], "expected_index": 1}],
    "gsm8k": [{"prompt": "What is 2 + 2?", "upstream_answer": "2 + 2 = 4\n#### 4"}],
}
ROLLING = """\
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{ text }}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, questions in QUESTIONS.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps(question) for question in questions]
        (tmp_path / name / "cases.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_our_tasks_are_asked_and_scored(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(data / "cache"))
    found = json.loads(run("eval", "tasks", "--data", data, "--json").out)
    rows = {(row["task"], row["metric"]): row for row in found["rows"]}
    assert {task for task, _ in rows} == set(QUESTIONS)
    assert rows["hellaswag", "acc"]["value"] == 1 and rows["hellaswag", "acc"]["questions"] == 2
    assert 0 <= rows["gsm8k", "exact_match (strict-match)"]["value"] <= 1


def test_a_folder_of_tasks_is_run(run: Run, tmp_path: Path) -> None:
    lines = [{"text": "def mean(xs):\n    return sum(xs) / len(xs)\n" * 3}]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "words.yaml").write_text(ROLLING.format(file=tmp_path / "words.jsonl"))
    result = run("eval", "tasks", "--tasks", tmp_path, "--json")
    [row] = json.loads(result.out)["rows"]
    assert (row["task"], row["metric"]) == ("words", "bits_per_byte") and 0 < row["value"] < 2


def test_what_is_not_there_is_one_line(run: Run, tmp_path: Path) -> None:
    failed(run("eval", "tasks", "--tasks", "sorcery"), "sorcery.*hellaswag")
    failed(run("eval", "tasks", "--data", tmp_path), "cases.jsonl")
