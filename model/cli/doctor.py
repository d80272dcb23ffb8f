"""`pykernels doctor`: what this machine can do and what stands in the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from .common import EXIT_PROBLEM, Debug, command, err, out, prepare_threads

if TYPE_CHECKING:
    from ..doctor.report import Fact, Report


@command
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Look at this machine and try the kernels; exit code 1 with the hint if something lacks."""
    prepare_threads(None)
    from ..doctor.examine import examine

    with err().status("looking …", spinner_style="dim") as status:
        report = examine(progress=lambda what: status.update(f"{what} …"))
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    if report.problems:
        raise typer.Exit(EXIT_PROBLEM)


_MANY = 3  # neighbours with the same value share one line


def _alike(facts: list[Fact]) -> Iterator[tuple[list[str], Fact]]:
    """Neighbouring facts that differ only by name, grouped: (their names, the first)."""
    for _, same in groupby(facts, key=lambda fact: (fact.value, fact.problem, fact.hint)):
        group = list(same)
        yield [fact.name for fact in group], group[0]


def _show(report: Report) -> None:
    """A table of the sections, then the problems, each with its hint."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, facts in report.sections.items():
        table.add_row(Text(section, style="bold"))
        for names, fact in _alike(facts):
            style = "red" if fact.problem else ""
            if len(names) < _MANY:
                for name in names:
                    table.add_row(Text(f"  {name}", style="cyan"), Text(fact.value, style))
            else:
                table.add_row(Text(f"  {len(names)} alike", style="cyan"), Text(fact.value, style))
                table.add_row("", Text(", ".join(names), style="cyan"))
    console = out()
    console.print(table)
    for text in dict.fromkeys(f"{fact.problem}. {fact.hint}." for fact in report.problems):
        console.print(Text("✗ ", style="bold red") + Text(text))
    if not report.problems:
        console.print(Text("✓ ", style="bold green") + Text("nothing is missing"))
