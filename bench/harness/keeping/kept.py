"""Rows of a command of ``pykernels bench``: shown and kept as each is measured.

A line of the terminal and, with ``--save``, a file for each row; at the end, however it comes, all
of them as a table, a plot, or as ``--json`` on stdout. Ctrl-C, SIGTERM and an error lose nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.cli.shared.common import EXIT_PROBLEM, err, out
from pykernels.errors import PykernelsError

from .ending import KILLED, ending, ending_on_signals, not_measured, why_ended
from .provenance import gpus, provenance
from .whole import write_whole

if TYPE_CHECKING:  # it imports torch, which a start of any command would wait for
    from bench.harness.timing.rows import Row

Results = dict[str, Any]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="At the end one JSON object on stdout, nothing else: command, commit and machine, then"
        " rows; of a run that was stopped those that it has.",
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(
        "--save",
        metavar="FILE.json",
        help="The same object as a file, written whole after each row: until the last one"
        ' "complete" is false and "missing" names the rows that are not there.',
    ),
]


_NAMED = 8
"""Rows that are not there are named up to so many."""

TABLES = {
    "prefill": "bench.prefill.table",
    "dslp": "bench.several_gpus.dslp.table",
    "disagg": "bench.several_gpus.disagg.table",
    "tensor": "bench.several_gpus.tensor.table",
    "cache": "bench.cache.table",
    "mixed": "bench.mixed.table",
    "load": "bench.load.table",
    "contexts": "bench.contexts.table",
    "drafts": "bench.drafts.table",
}
"""Modules by the command: ``line(row)`` for the terminal, ``tables(results)`` to print at the end,
and, where it has a plot, ``draw(results, path)``."""


def table_of(bench: str) -> Any:
    """The module of ``TABLES``."""
    return importlib.import_module(TABLES[bench])


class Kept:
    """The rows of a run so far.

    Attributes:
        head: what they have in common; set before the first row.
        plan: of each row to come the columns that name it.
        stopped: why no more rows come, where that is no error; "": they all came.
    """

    def __init__(self, bench: str, file: Path | None, show: Callable[[Row], None]) -> None:
        self.bench = bench
        self.head: Row = {}
        self.plan: list[Row] = []
        self.rows: list[Row] = []
        self.why, self.stopped = KILLED, ""
        self._file, self._show, self._made = file, show, provenance()

    def add(self, row: Row) -> None:
        """A row that was measured, or has its ``why``."""
        self.rows.append(row)
        self.write()
        self._show(row)

    def results(self) -> Results:
        """All of it as one JSON object."""
        missing = not_measured(self.plan, self.rows)
        end = ending(missing, self.why)
        made = {"bench": self.bench, **self._made, "gpu": gpus()}  # known once it is used
        return {**made, **self.head, **end, "rows": self.rows}

    def write(self) -> None:
        """Puts the file in the place of the one before."""
        if self._file is not None:
            write_whole(self._file, json.dumps(self.results(), indent=1) + "\n")


@contextmanager
def keeping(
    bench: str, file: Path | None, as_json: bool, plot: Path | None = None
) -> Iterator[Kept]:
    """A block that measures; however it ends, its rows are told and are in the file.

    Args:
        bench: of ``TABLES``.
        file: of ``--save``; ``plot``: of ``--plot``.

    Raises:
        PykernelsError: a file cannot be written.
        typer.Exit: with code 1, after a row that failed.
    """
    table, console = table_of(bench), err()

    def show(row: Row) -> None:
        if as_json and not console.is_terminal:
            return
        text = f"FAILED: {row['why']}" if "why" in row else table.line(row)
        console.print(f"{name_of(kept.plan, row)}: {text}", markup=False)

    if file is not None:
        check_file(file)
    kept = Kept(bench, file, show)
    with ending_on_signals():
        try:
            yield kept
            kept.why = kept.stopped
        except BaseException as error:
            kept.why = why_ended(error)
            raise
        finally:
            if kept.rows:
                try:
                    kept.write()
                finally:
                    tell(kept.results(), as_json, plot)
    if any("why" in row for row in kept.rows):
        raise typer.Exit(EXIT_PROBLEM)


def tell(results: Results, as_json: bool, plot: Path | None) -> None:
    """Prints results, and draws those that have figures."""
    timed = {**results, "rows": [row for row in results["rows"] if "why" not in row]}
    table = table_of(results["bench"])
    if plot is not None and not hasattr(table, "draw"):
        raise PykernelsError(f"bench {results['bench']} has no plot", "Leave --plot out")
    if plot is not None and timed["rows"]:
        table.draw(timed, plot)
    if as_json:
        print(json.dumps(results), flush=True)
        return
    for shown in table.tables(timed) if timed["rows"] else []:
        out().print(shown)
    if not results["complete"]:
        names = ", ".join(name_of([], row) for row in results["missing"][:_NAMED])
        if (more := len(results["missing"]) - _NAMED) > 0:
            names += f" and {more} more"
        why = f", {results['why']}" if results["why"] else ""
        err().print(f"not measured{why}: {names}", markup=False)


def name_of(plan: Sequence[Row], row: Row) -> str:
    """A row's columns that name it, as words."""
    named = next((named for named in plan if named.items() <= row.items()), row)
    words = [value if isinstance(value, str) else f"{value} {key}" for key, value in named.items()]
    return " ".join(word or f"no {key}" for key, word in zip(named, words, strict=True))


def check_file(file: Path) -> None:
    """Before minutes of measuring: whether a file can be written. Nothing is left behind.

    Raises:
        PykernelsError: it cannot.
    """
    hint = "Give --save a file in a folder that you may write to"
    if file.is_dir():
        raise PykernelsError(f"--save {file} is a folder", hint)
    try:
        with tempfile.TemporaryDirectory(dir=file.parent):
            pass
    except OSError as error:
        raise PykernelsError(f"--save {file}: {os.strerror(error.errno or 0)}", hint) from None
