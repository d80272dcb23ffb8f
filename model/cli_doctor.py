"""`pykernels doctor`: what this machine can do and what stands in the way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_common import EXIT_PROBLEM, Debug, command, err, out, prepare_threads

if TYPE_CHECKING:
    from .doctor_report import Report


@command
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Look at this machine and try the kernels; exit code 1 with the mend if something lacks."""
    prepare_threads(None)
    from .doctor import examine

    with err().status("looking …", spinner_style="dim") as status:
        report = examine(progress=lambda what: status.update(f"{what} …"))
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    if report.problems:
        raise typer.Exit(EXIT_PROBLEM)


def _show(report: Report) -> None:
    """A table of the sections, then the problems, each with its mend."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, facts in report.sections.items():
        table.add_row(Text(section, style="bold"))
        for fact in facts:
            name = Text(f"  {fact.name}", style="cyan")
            table.add_row(name, Text(fact.value, style="red" if fact.problem else ""))
    console = out()
    console.print(table)
    for fact in report.problems:
        console.print(Text("✗ ", style="bold red") + Text(f"{fact.problem}. {fact.mend}."))
    if not report.problems:
        console.print(Text("✓ ", style="bold green") + Text("nothing is missing"))
