"""A run from its first row to its files: what is kept of it, how it ends, its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from bench.peers.catalog import RESULTS
from model.cli.shared.common import EXIT_ERROR, EXIT_INTERRUPTED
from model.extras import how_to_install
from pykernels.errors import PykernelsError

from .files import Partial, Results, check_folder, write
from .keeping.ending import KILLED, ending, why_ended
from .keeping.provenance import provenance
from .timing.rows import Row

EXIT_FAILED = 1


class UnderWay(list[Row]):
    """The rows that a part has so far; the next ones of the part take their place."""


class Run(Protocol):
    """The measurements of one run."""

    def rows(self) -> Iterator[list[Row]]:
        """The rows, part by part, as they are measured; none begun beyond the time limit. A part
        may also yield what it has ``UnderWay``."""
        ...

    def head(self) -> Results:
        """All of the results but the rows; of ``missing`` and ``why`` those of the time limit."""
        ...


AnyRun = TypeVar("AnyRun", bound=Run)


def measure_and_keep(run: Run, out: Path | None, show: Callable[[Row], None]) -> Results:
    """The run; its rows are shown, and in a file, before the next part begins.

    Args:
        out: the results folder; None: no files.

    Raises:
        BaseException: what ended it early, Ctrl-C too. The rows so far are in the partial files.
    """
    rows: list[Row] = []
    under_way: list[Row] = []
    partial = Partial(out) if out else None

    def results(why: str = "") -> Results:
        head = run.head()
        end = ending(head["missing"], why or head["why"])
        return {**provenance(), **head, **end, "rows": [*rows, *under_way]}

    try:
        for some in run.rows():
            is_whole = not isinstance(some, UnderWay)
            under_way = [] if is_whole else some
            rows += some if is_whole else []
            if partial and (rows or under_way):
                partial.keep(results(KILLED))
            for row in some if is_whole else []:
                show(row)
    except BaseException as error:
        for row in under_way:
            show(row)
        if partial and (rows or under_way):
            partial.keep(results(why_ended(error)))
            print("what was measured:", *partial.paths, file=sys.stderr)
        raise
    if out and partial and rows:
        for path in write(results(), out):
            print(path, file=sys.stderr)
        partial.drop()
    return results()


def exit_code(command: Callable[[], int], debug: bool = False) -> int:
    """What the command returns; an error of it as one line and the code for that."""
    try:
        return command()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except PykernelsError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except Exception as error:
        if debug:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        print(f"error: unexpected {what}. --debug shows the traceback.", file=sys.stderr)
        return EXIT_FAILED


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``run_command`` reads."""
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS, metavar="DIR", help="results folder")
    add("--check", action="store_true", help="measure nothing, only say what cannot be")
    add("--debug", action="store_true", help="tracebacks")


def run_command(
    chosen: argparse.Namespace,
    prepare: Callable[[argparse.Namespace], AnyRun],
    measure: Callable[[AnyRun, Path], None],
) -> int:
    """A benchmark from its options (``add_run_options``) to its exit code: what could fail is
    tried before minutes of measuring, and ``--check`` stops there."""

    def command() -> int:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise PykernelsError("matplotlib is not installed", how_to_install("bench")) from None
        check_folder(chosen.out)
        run = prepare(chosen)
        if not chosen.check:
            measure(run, chosen.out)
        return 0

    return exit_code(command, chosen.debug)
