"""The one exception a person is meant to read: what is wrong, and what helps."""

from __future__ import annotations


class PykernelsError(Exception):
    """A mistake in the input or the machine, told in one line.

    The command line prints ``str(error)`` and exits with code 2, so neither part may hold a
    newline.

    Args:
        cause: what is wrong, with the names and numbers that a reader needs to find it.
        hint: what to do about it.
    """

    def __init__(self, cause: str, hint: str) -> None:
        self.cause = " ".join(cause.split()).rstrip(".")
        self.hint = " ".join(hint.split()).rstrip(".")
        super().__init__(f"{self.cause}. {self.hint}.")
