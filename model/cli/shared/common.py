"""What every command shares: the two consoles, errors as one line, OpenMP's settings.

The text or table that was asked for goes to stdout; progress, notes, errors and summaries go to
stderr, so that a pipe gets the text alone. Nothing heavy is imported at the top, to keep
`pykernels --help` quick.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pykernels.env import check_temporary_folder, env
from pykernels.errors import PykernelsError
from pykernels.registry import requested

from .options import with_options

P = ParamSpec("P")

EXIT_PROBLEM = 1
"""`doctor` found something missing, or the program met a bug of its own."""
EXIT_ERROR = 2
"""Bad input, or a machine that cannot do what was asked; one line on stderr."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""

OURS = r"(pykernels|runtime|model|bench)(\.|$)"
"""Modules whose warnings are shown, as notes; those of other libraries only with --debug."""


_WIDEST = 10_000
"""Columns of text that a table may take."""


class State:
    """Set by `--debug`, before or behind the command."""

    debug: bool = False


def _set_debug(value: bool) -> bool:
    State.debug = State.debug or value
    return value


Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and library warnings.", callback=_set_debug)
]


def out() -> Console:
    """Console on stdout (made for each use: a test may have replaced the stream)."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """Console on stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def show(table: Table | str) -> None:
    """A table on stdout, wide enough for its words and numbers: none is cut off. Where stdout is no
    terminal its lines are whole. A text is printed as it is."""
    console = out()
    if isinstance(table, str):
        console.print(table)
        return
    wide = console.options.update(max_width=_WIDEST)
    for column in table.columns:
        cells = [Measurement.get(console, wide, each) for each in (column.header, *column.cells)]
        column.min_width = max(each.maximum if column.no_wrap else each.minimum for each in cells)
    size = Measurement.get(console, wide, table)
    folds = console.is_terminal or "COLUMNS" in os.environ
    console.width = max(console.width, size.minimum if folds else size.maximum)
    console.print(table)


def note(text: str) -> None:
    """One line on stderr, `note: ...`."""
    err().print(f"note: {text}", style="dim", markup=False)


def command(function: Callable[P, None]) -> Callable[..., None]:
    """Turn what a command raises into one line on stderr and an exit code, and its parameters that
    are dataclasses into options (``options``)."""
    function = with_options(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as main() leaves it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with warnings.catch_warnings():
                _show_our_warnings_as_notes()
                env.check()
                check_temporary_folder()
                requested()
                _run(function, *args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            err().print()
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except PykernelsError as error:
            raise refused(error) from None
        except Exception as error:
            if _interrupted(error):
                raise typer.Exit(EXIT_INTERRUPTED) from None
            what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
            hint = "" if State.debug else ". Run it again with --debug for the traceback"
            raise _fail(f"unexpected {what}{hint}", EXIT_PROBLEM) from None

    # The help folds a paragraph to the terminal, if it has no line breaks of its own.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    wrapped.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    return wrapped


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: an import that is interrupted may fail in other ways."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _run(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call it; a stdout that cannot be written to is an error of one line, not a bug."""
    if sys.stdout is None:
        raise PykernelsError("stdout is closed", "Send it to a file or to /dev/null")
    try:
        function(*args, **kwargs)
        sys.stdout.flush()
    except UnicodeEncodeError as error:
        what = f"{error.object[error.start : error.end]!r} cannot be written as {error.encoding}"
        raise PykernelsError(what, "Use a UTF-8 locale, or set PYTHONIOENCODING=utf-8") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise unwritable(error) from error


def unwritable(error: OSError) -> PykernelsError:
    """What to do where stdout takes no more."""
    return PykernelsError(
        f"the output cannot be written: {error.strerror}", "Free some space, or send it elsewhere"
    )


def refused(error: PykernelsError) -> typer.Exit:
    """Says what is wrong with the input; the exit that ends the command."""
    return _fail(str(error), EXIT_ERROR)


def _fail(message: str, code: int) -> typer.Exit:
    if State.debug:
        traceback.print_exc()
    console = err()
    console.print("error: ", style="bold red", end="")
    console.print(message, markup=False)
    return typer.Exit(code)


def _show_our_warnings_as_notes() -> None:
    """Warnings of this project become one-line notes; other libraries' are for --debug."""
    if State.debug:
        return
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=UserWarning, module=OURS)

    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in shown:  # a file's tokenizer is read twice, for one
            shown.add(text)
            note(text)

    warnings.showwarning = show


def prepare_threads(threads: int | None) -> int | None:
    """Check `--threads` and set OpenMP's defaults; call it before torch is imported.

    torch's OpenMP threads would otherwise spin between operations on the very cores that the pinned
    expert workers use. What the user has set stays. Returns the worker threads asked for (the
    option, else PYKERNELS_THREADS), None for the default. Raises `PykernelsError` for none, and for
    more than the cores that this process may use.
    """
    from runtime.machine.topology import Topology

    topology = Topology.detect()
    usable = topology.usable
    chosen = env.threads if threads is None else threads
    flag = "PYKERNELS_THREADS" if threads is None else "--threads"
    if chosen is not None and chosen < 1:
        raise PykernelsError(f"{chosen} threads", f"Give {flag} 1 to {usable}")
    if chosen is not None and chosen > usable:
        raise PykernelsError(
            f"{chosen} threads are more than the {usable} core{'s' * (usable > 1)} that this"
            " process may use",
            f"Give {flag} {usable} or fewer, or allow it more cores (taskset, cgroup)",
        )
    for name, value in {
        "OMP_NUM_THREADS": str(chosen or topology.default_threads()),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    return chosen


def read_key(file: Path | None) -> str | None:
    """The key of an API in a file's first line; None without a file."""
    if file is None:
        return None
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PykernelsError(f"{file} cannot be read: {error}", "Give a file with a key") from error
    if not lines or not lines[0].strip():
        raise PykernelsError(f"the first line of {file} is empty", "Write the key there")
    return lines[0].strip()
