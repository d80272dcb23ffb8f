"""Tasks with experts deferred and skipped: SOSP'25 Table 2 and Figure 13 for one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.passes import skip
from runtime.passes.layers import moe_layers

from ..load import load_engine
from .harness import Score, Tasks, evaluate
from .humaneval import Draws
from .likelihood import ROWS
from .made import made_by
from .progress import Progress


@dataclass(frozen=True)
class Column:
    """Scores of one method and number of affected experts."""

    method: str
    affected: int
    rows: tuple[Score, ...]


@dataclass(frozen=True)
class Comparison:
    """What was asked of which model, and its columns: none affected first."""

    model: str
    topk: int
    device: str
    cpu: str
    seconds: float
    columns: tuple[Column, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(
    path: Path,
    tasks: Tasks,
    affected: Sequence[int],
    limit: int | None = None,
    draws: Draws | None = None,
    progress: Progress = lambda what, total: lambda count: None,
    told: Callable[[Column], None] = lambda column: None,
    device: str = "cpu",
    **settings: Any,
) -> Comparison:
    """Asks the questions once for each method and number of experts.

    A prompt is read as it is: experts of its tokens are neither deferred, as in the paper, nor
    skipped. Skipping changes whole steps and spares those with a part of a prompt, so questions are
    asked one after another; of several draws of one, the first may begin in such a step.

    Args:
        affected: experts of each token; 0 is always asked, as what others are held against.
        told: called with each column as it is known.
        settings: of ``load_engine``.

    Raises:
        PykernelsError: a number that leaves fewer than two experts in place, and what
            ``load_engine`` raises.
    """
    from pykernels.target import detect

    numbers = sorted(set(affected) - {0})
    ways: list[tuple[str, int, dict[str, Any]]] = [("none", 0, {})]
    for N in numbers:
        ways.append(("skipping", N, {"passes": [partial(skip, N=N)]}))
        ways.append(("deferral", N, {"defer": N}))
    columns, model, topk, seconds = [], "", 0, 0.0
    for method, N, how in ways:
        named = method if not N else f"{method} of {N}"

        def begin(what: str, total: int, named: str = named) -> Callable[[int], None]:
            return progress(f"{named}: {what}", total)

        sizes = {"max_num_logits": ROWS, "draft": "off", **settings, **how}
        with load_engine(path, device=device, **sizes) as llm:
            scores = evaluate(llm, tasks, limit, False, begin, draws, in_turn=True)
            layers = moe_layers(llm.runner.model.lower())
            model, topk = scores.model, min(layer.topk for layer in layers)
        seconds += scores.seconds
        columns.append(Column(method, N, scores.rows))
        told(columns[-1])
    return Comparison(model, topk, device, detect().cpu, round(seconds, 1), tuple(columns))


def cells(table: Comparison) -> list[list[str]]:
    """Rows of the table: a task and metric, then its score in each column; a line of titles
    first, in which (I + D) are immediate and affected experts, as in the paper."""
    head = ["task", "metric", "questions"]
    for column in table.columns:
        split = f"({table.topk - column.affected}+{column.affected})"
        head.append(split if not column.affected else f"{column.method} {split}")
    rows = [head]
    for at, first in enumerate(table.columns[0].rows):
        row = [first.task, first.metric, str(first.questions)]
        row += [_percent(column.rows[at]) for column in table.columns]
        rows.append(row)
    return rows


def _percent(score: Score) -> str:
    error = "" if score.error is None else f" ± {100 * score.error:.1f}"
    return f"{100 * score.value:.1f}{error}"


def write(table: Comparison, folder: Path, date: str) -> list[Path]:
    """Writes ``DATE-tasks-DEVICE`` as .md and .json."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{date}-tasks-{table.device.replace(':', '').replace(',', '-')}"
    page, numbers = folder / f"{stem}.md", folder / f"{stem}.json"
    numbers.write_text(json.dumps(made_by() | table.as_dict(), indent=1) + "\n")
    page.write_text(markdown(table))
    return [page, numbers]


def markdown(table: Comparison) -> str:
    """The page."""
    head, *rows = cells(table)
    lines = [
        "# Tasks with experts deferred and skipped",
        "",
        f"{table.model} on {table.device} beside {table.cpu}; scores in percent with their standard"
        f" error over the questions. (I+D): of the {table.topk} experts of each token of an answer,"
        " I count at once and D, those of the smallest weights, a layer later (deferral) or not at"
        " all (skipping); prompts are read with all. SOSP'25 has DeepSeek-V3 in these places: its"
        " Table 2 with deferral, its Figure 13 with both.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
