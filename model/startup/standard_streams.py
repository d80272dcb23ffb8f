"""stdin, stdout and stderr as a program of this project has them, whatever it was started with."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Any


class _Lossy(io.FileIO):
    """A file that takes everything; what cannot be written is lost."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            written = super().write(data)
            if written is not None:  # else it would have to wait
                return written
        return memoryview(data).nbytes


def settle_standard_streams() -> None:
    """Called once, when a program begins.

    - Work does not end because nobody can be told of it: a stderr that is closed, or on a full
      disk, loses what is written. What was asked for goes to stdout, which fails as ever.
    - The number of a stream that is closed is taken: or the next file would get it, and with it
      what a library writes there.
    - A locale without an encoding (POSIX) means UTF-8, as in Python's own UTF-8 mode, unless
      PYTHONIOENCODING says otherwise.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, and so this one
            os.set_inheritable(number, True)
    if sys.stderr is None or _is_ours(sys.stderr, 2):
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(2, "wb", closefd=False)),
            encoding,
            "backslashreplace",
            line_buffering=True,
        )
    if "PYTHONIOENCODING" in os.environ:
        return
    streams = (sys.stdin, "strict"), (sys.stdout, "surrogateescape"), (sys.stderr, None)
    for stream, errors in streams:
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8", errors=errors or stream.errors)


def argument_text(argument: str) -> str:
    """The text of an argument that the locale could not decode, but UTF-8 can; any other as it
    is."""
    if any("\udc80" <= character <= "\udcff" for character in argument):
        with contextlib.suppress(UnicodeError):
            return os.fsencode(argument).decode("utf-8")
    return argument


def _is_ours(stream: Any, number: int) -> bool:
    """Whether Python has made a stream for that number, and not somebody in its place."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False
