"""`pykernels eval compare`: tasks with experts deferred, and skipped."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..shared.common import Debug, command, show
from ..shared.execution import opened_with
from ..shared.model_options import Model
from ..shared.options import Choose
from .results import AsJson, Write, wrote
from .tasks import Data, Drawn, Limit, Which, go_offline, progress, tell_sandbox

if TYPE_CHECKING:
    from rich.table import Table

    from ...evaluation.compare import Comparison


@command
def compare(
    drawn: Drawn,
    execution: Annotated[ExecutionConfig, Choose(but=("defer",))],
    model: Model = None,
    which: Which = "humaneval,gsm8k",
    affected: Annotated[
        str, typer.Option(metavar="N,N,...", help="Affected experts of a token.")
    ] = "0,2,3",
    data: Data = None,
    limit: Limit = None,
    as_json: AsJson = False,
    write: Write = None,
    debug: Debug = False,
) -> None:
    """Ask tasks with N experts of each written token deferred, and with N skipped.

    Scores of answers that are chosen, not written, are those of prompts, where neither is done.
    """
    go_offline()
    numbers = numbers_of("--affected", affected)
    path, execution = opened_with(execution, model)
    from ...evaluation import compare as compared
    from ...evaluation.harness import find_tasks
    from ...evaluation.humaneval import Draws

    tasks = find_tasks(which, data)
    tell_sandbox(bool(tasks.problems))
    with progress() as told:
        result = compared.compare(
            path,
            tasks,
            numbers,
            limit,
            Draws(drawn.samples, drawn.temperature, drawn.max_tokens),
            told,
            device=execution.device,
            execution=execution,
        )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        show(_table(result))
    if write is not None:
        wrote(compared.write(result, write, datetime.date.today().isoformat()))


def numbers_of(option: str, text: str) -> list[int]:
    """A list of numbers as an option has it."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PykernelsError(
            f"{option} {text!r} is no list of numbers", "Give one like 0,1,2"
        ) from None


def _table(result: Comparison) -> Table:
    from rich.table import Table

    from ...evaluation.compare import cells

    head, *rows = zip(*cells(result), strict=True)  # a column's experts are a row here
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
