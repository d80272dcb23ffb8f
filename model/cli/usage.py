"""Usage errors are one line, as every other error is: cause, hint, exit code 2."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from pykernels.errors import PykernelsError

from .shared.common import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PROBLEM, refused, unwritable

_BASES: Any = typer.BadParameter.__mro__
UsageError: type[Exception] = _BASES[1]
"""Typer's own since it brings its own click, else click's."""


class Commands(TyperGroup):
    """The commands, and what becomes of an option or a command that there is not."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs a command and ends the process, unless ``standalone_mode`` is off."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            ended = super().main(*args, **{**extra, "standalone_mode": False})
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # the help has been printed
                refused(as_error(error, extra.get("prog_name") or "pykernels"))
            sys.exit(EXIT_ERROR)
        except typer.Abort as error:
            interrupted = isinstance(error.__cause__, KeyboardInterrupt)
            sys.exit(EXIT_INTERRUPTED if interrupted else EXIT_PROBLEM)
        except OSError as error:  # the help has no room where it goes; commands say so themselves
            refused(unwritable(error))
            sys.exit(EXIT_ERROR)
        sys.exit(ended if isinstance(ended, int) else 0)


def as_error(error: Any, program: str) -> PykernelsError:
    """Cause and hint of a usage error."""
    context = error.ctx
    command = program if context is None else context.command_path
    hint = f"{command} --help has the options"
    wrong = getattr(error, "option_name", None)
    if close := get_close_matches(str(wrong), getattr(error, "possibilities", None) or (), 1):
        return PykernelsError(error.message, f"Did you mean {close[0]}? {hint}")
    cause, _, meant = error.format_message().partition(" Did you mean ")
    return PykernelsError(cause, f"Did you mean {meant} {hint}" if meant else hint)
