"""`pykernels eval lossless`: perplexity with every lossless pass on and off."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.planning.config import ExecutionConfig

from ..shared.common import EXIT_PROBLEM, Debug, command, err, out, show
from ..shared.execution import opened_with
from ..shared.model_options import Model, Rules
from ..shared.options import Choose
from .results import AsJson, Write, wrote

if TYPE_CHECKING:
    from rich.table import Table

    from ...evaluation.lossless import Result


SHOWN, DIGITS = 5, 12
"""Columns and digits that a terminal has room for; a page has all."""


@command
def lossless(
    execution: Annotated[ExecutionConfig, Choose(only=("device", "threads", "kernel"))],
    model: Model = None,
    rules: Rules = None,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of text that are scored, at least.")
    ] = 1500,
    length: Annotated[
        int, typer.Option(min=2, metavar="L", help="Tokens of one text; half of it is a prompt.")
    ] = 256,
    as_json: AsJson = False,
    write: Write = None,
    debug: Debug = False,
) -> None:
    """Perplexity of held-out text with every pass that must not change it on and off.

    Ends with 1 if one of them does. The device ref is the reference, in float32.
    """
    path, execution = opened_with(execution, model, rules)
    from ...evaluation import lossless_report
    from ...evaluation.lossless import evaluate

    with err().status("importing …", spinner_style="dim") as shown:
        result = evaluate(
            path,
            execution.device,
            tokens,
            length,
            rules=rules,
            told=lambda name: shown.update(f"{name} …"),
            threads=execution.threads,
            kernel=execution.kernel,
        )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        show(_table(result))
        for line in lossless_report.summary(result):
            out().print(line, markup=False)
    if write is not None:
        wrote(lossless_report.write(result, write, datetime.date.today().isoformat()))
    if not result.right:
        raise typer.Exit(EXIT_PROBLEM)


def _table(result: Result) -> Table:
    from rich.table import Table

    from ...evaluation.lossless_report import TITLES, cells

    table = Table(box=None, pad_edge=False)
    for title in TITLES[:SHOWN]:
        table.add_column(title, no_wrap=True)
    table.add_row("plainest", f"{result.perplexity:.{DIGITS}g}")
    for row in result.rows:
        table.add_row(*cells(row, DIGITS)[:SHOWN])
    return table
