"""`pykernels doctor`: what this machine can do and what stands in the way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .shared.common import EXIT_PROBLEM, Debug, command, err, out, prepare_threads

if TYPE_CHECKING:
    from rich.status import Status

    from ..doctor.report import Fact, Report


@command
def doctor(
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Try all formats, on every kernel that this CPU can run: the first time that takes"
            " some minutes.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Look at this machine and try its kernels; exit code 1 with the hint if something lacks.

    Each fact is printed as soon as it is known. Common formats are tried, and those that were
    compiled before; kernels that were never run are compiled, about ten seconds each.
    """
    prepare_threads(None)
    from ..doctor.examine import examine

    with err().status("looking …", spinner_style="dim") as status:
        printer = Printer(status)
        report = examine(
            progress=lambda what: status.update(f"{what} …"),
            known=(lambda section, fact: None) if as_json else printer,
            every=every,
        )
        printer.flush()
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _end(report)
    if report.problems:
        raise typer.Exit(EXIT_PROBLEM)


_MANY = 3
"""Neighbours with the same value, from so many on, share one line."""
_OF_FORMATS = ("expert kernels", "calibration")
"""Sections of as many facts as there are formats, most of them alike, and none of them slow."""
_NAME = 24
"""Columns of a fact's name."""


class Printer:
    """Prints facts as they come; where formats have the same value they share a line.

    Args:
        status: a spinner, which makes room for each line.
    """

    def __init__(self, status: Status) -> None:
        self._status, self._section = status, ""
        self._alike: list[Fact] = []

    def __call__(self, section: str, fact: Fact) -> None:
        """Takes a fact."""
        if self._alike and not (section == self._section and _same(fact, self._alike[0])):
            self.flush()
        if section != self._section:
            self._section = section
            self._print(section, style="bold")
        if section in _OF_FORMATS:
            self._alike.append(fact)
        else:
            self._line(fact.name, fact)

    def flush(self) -> None:
        """Prints those that wait."""
        alike, self._alike = self._alike, []
        if len(alike) < _MANY:
            for fact in alike:
                self._line(fact.name, fact)
            return
        self._line(f"{len(alike)} alike", alike[0])
        self._print(" " * (_NAME + 2) + ", ".join(fact.name for fact in alike), style="cyan")

    def _line(self, name: str, fact: Fact) -> None:
        from rich.text import Text

        value = Text(fact.value, "red" if fact.problem else "")
        self._print(Text(f"  {name:<{_NAME - 1}} ", style="cyan") + value)

    def _print(self, what: object, style: str = "") -> None:
        self._status.stop()
        out().print(what, style=style, markup=False)
        self._status.start()


def _same(one: Fact, other: Fact) -> bool:
    return (one.value, one.problem, one.hint) == (other.value, other.problem, other.hint)


def _end(report: Report) -> None:
    """The problems, each with its hint."""
    from rich.text import Text

    console = out()
    for text in dict.fromkeys(f"{fact.problem}. {fact.hint}." for fact in report.problems):
        console.print(Text("✗ ", style="bold red") + Text(text))
    if not report.problems:
        console.print(Text("✓ ", style="bold green") + Text("nothing is missing"))
