"""Files that are whole at any moment: the new one is put in the place of the old one."""

from __future__ import annotations

from pathlib import Path

from pykernels.errors import PykernelsError


def write_whole(path: Path, text: str) -> None:
    """Puts a text in the place of a file.

    Raises:
        PykernelsError: it cannot be written.
    """
    try:
        replace(path, text)
    except OSError as error:
        raise PykernelsError(
            f"{path} cannot be written: {error.strerror}", "Free some space, or name another file"
        ) from None


def replace(path: Path, text: str) -> None:
    """Replaces a file as ``write_whole`` does. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
