"""Table 2's form: tasks with experts deferred."""

from __future__ import annotations

import json

from ..cells import Cell, file_of
from ..rows import RESULTS
from . import told

FILE = RESULTS / "amd-epyc-znver5-2-cores" / "2026-11-28-tasks-cpu.json"
TASKS = {"humaneval": "HumanEval", "mbpp": "MBPP", "gsm8k": "GSM8K", "strategyqa": "StrategyQA"}


def table2() -> list[Cell]:
    """The paper's scores; those of the embedded model, of ten million parameters, in its form."""
    found = [
        Cell("Table 2", f"{model}: {name}", "%", score)
        for model, scores in told.TABLE_2.items()
        for name, score in zip(told.BENCHMARKS, scores, strict=True)
    ]
    data = json.loads(FILE.read_text())
    for column in data["columns"]:
        if column["method"] == "skipping":
            continue
        away = column["affected"]
        for row in column["rows"]:
            name = f"{TASKS[row['task']]}, {row['metric']}"
            what = f"embedded model ({data['topk'] - away}+{away}): {name}"
            score = 100 * row["value"]
            found.append(Cell("Table 2", what, "%", measured=score, file=file_of(FILE)))
    return found
