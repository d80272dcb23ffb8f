"""The texts of a run: JSON and the Markdown page; and what is kept of one that ends early."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

Results = dict[str, Any]


def check_folder(out: Path) -> None:
    """Before minutes of measuring: whether results can be written there. Nothing is left behind.

    Raises:
        PykernelsError: they cannot.
    """
    with writing(out):
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        with tempfile.TemporaryDirectory(dir=there):  # of /proc, rights alone say nothing
            pass


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line, a PykernelsError."""
    try:
        yield
    except OSError as error:
        raise PykernelsError(
            f"results cannot be written to {folder}: {error.strerror}",
            "Give --out a folder that you may write to, with room for them",
        ) from None


def write_texts(results: Results, folder: Path, name: str, page: str) -> list[Path]:
    """``name``.json and ``name``.md; the paths written.

    Raises:
        PykernelsError: they cannot be.
    """
    paths = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for ending, text in {"json": json.dumps(results, indent=1) + "\n", "md": page}.items():
            path, new = folder / f"{name}.{ending}", folder / f"{name}.{ending}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(path)  # whole at any moment
            paths.append(path)
    return paths


def unused(folder: Path, name: str) -> str:
    """``name``, or with the first number that no results in the folder have: "2031-02-03-2"."""
    found, number = name, 1
    while (folder / f"{found}.json").exists():
        number += 1
        found = f"{name}-{number}"
    return found


class Partial:
    """``<date>-partial.json`` and ``.md``: written again after each part, so that a run that is
    killed has lost one part at most. Those of an earlier run are left alone.

    Args:
        out: the results folder.
        stem: the name of a whole run's files.
        page: the Markdown, without plots.
    """

    def __init__(
        self, out: Path, stem: Callable[[Results], str], page: Callable[[Results], str]
    ) -> None:
        self._out, self._stem, self._page = out, stem, page
        self.name = ""
        self.paths: list[Path] = []

    def keep(self, results: Results) -> None:
        """Puts these results in the place of those kept before."""
        folder = self._out / results["machine"]["slug"]
        if not self.name:
            self.name = unused(folder, f"{self._stem(results)}-partial")
        self.paths = write_texts(results, folder, self.name, self._page(results))

    def drop(self) -> None:
        """Removes them: the run has ended well and its files are written."""
        with writing(self._out):
            for path in self.paths:
                path.unlink(missing_ok=True)
        self.paths = []
