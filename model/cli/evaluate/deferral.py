"""`pykernels eval deferral`: bits a byte with experts deferred, and skipped."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Annotated

import typer

from ..shared.common import Debug, command, err, out, show
from ..shared.execution import WorkersKernel, opened_with
from ..shared.model_options import Model
from .compare import numbers_of
from .results import AsJson, Write, wrote

if TYPE_CHECKING:
    from rich.table import Table

    from ...evaluation.deferral import Result


@command
def deferral(
    execution: WorkersKernel,
    model: Model = None,
    experts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Affected experts of a token.")
    ] = "0,1,2,3,4",
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of text.", show_default="16000, or all there are"
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=2, metavar="L", help="Tokens of one sequence.")] = 512,
    as_json: AsJson = False,
    write: Write = None,
    debug: Debug = False,
) -> None:
    """Hold Expert Deferral against Expert Skipping on text that training never saw."""
    numbers = numbers_of("--experts", experts)
    path, execution = opened_with(execution, model)
    from rich.progress import Progress

    from ... import load_engine
    from ...evaluation import deferral_report
    from ...evaluation.deferral import evaluate

    console = err()
    with (
        load_engine(
            path,
            execution=execution,
            max_model_len=64,
            max_num_seqs=1,
        ) as llm,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("scoring")
        result = evaluate(
            llm,
            numbers,
            tokens,
            length,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        show(_table(result))
        for line in deferral_report.summary(result):
            out().print(line, markup=False)
    if write is not None:
        wrote(deferral_report.write(result, write, datetime.date.today().isoformat()))


def _table(result: Result) -> Table:
    from rich.table import Table

    table = Table("affected", "method", box=None, pad_edge=False)
    for title in ("bits a byte", "change", "same next token", "right"):
        table.add_column(title, justify="right")
    for row in result.rows:
        change = f"{row.change:+.2f} ± {row.error:.2f} %" if row.affected else ""
        table.add_row(
            str(row.affected),
            row.method,
            f"{row.bits_per_byte:.4f}",
            change,
            f"{row.agreement:.2%}",
            f"{row.accuracy:.2%}",
        )
    return table
