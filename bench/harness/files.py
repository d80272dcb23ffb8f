"""The files of a run: JSON, the Markdown page, plots; and what is kept of one that ends early."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

from .keeping.whole import replace, write_whole
from .report import markdown

Results = dict[str, Any]
"""What ``provenance`` says; ``machine``, ``settings``, ``quick``, ``part`` (ops or sections, if not
all), ``headline``, ``notes`` (sentences for the page); ``complete``, ``missing`` and ``why`` as
``ending`` has them; ``rows``."""


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


def stem(results: Results) -> str:
    """Name of a run's files: "2031-02-03", "2031-02-03-quick-moe"."""
    day = results["machine"]["date"].split()[0]
    return "-".join([day, *(["quick"] if results["quick"] else []), *results["part"]])


def write(results: Results, out: Path) -> list[Path]:
    """JSON, the page and plots, in the folder of the machine; the paths written.

    A run never takes the place of another: the second of a day has a number.

    Raises:
        PykernelsError: they cannot be written.
    """
    folder = out / results["machine"]["slug"]
    name = _unused(folder, stem(results))
    drawn = _draw(results, folder, name)
    return [*_write_texts(results, folder, name, [path.name for path in drawn]), *drawn]


def again(results: Results, file: Path) -> list[Path]:
    """The page and the plots of results in a file, beside it; the paths written.

    Raises:
        PykernelsError: they cannot be written.
    """
    drawn = _draw(results, file.parent, file.stem)
    page = file.with_suffix(".md")
    write_whole(page, markdown(results, [path.name for path in drawn]))
    return [page, *drawn]


def _draw(results: Results, folder: Path, name: str) -> list[Path]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            from .plots import draw

            return draw(results, folder, name)
        except ImportError:
            print("note: no plots without matplotlib: pip install matplotlib", file=sys.stderr)
            return []


def _write_texts(results: Results, folder: Path, name: str, plots: list[str]) -> list[Path]:
    paths = []
    texts = {"json": json.dumps(results, indent=1) + "\n", "md": markdown(results, plots)}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for ending, text in texts.items():
            path = folder / f"{name}.{ending}"
            replace(path, text)
            paths.append(path)
    return paths


def _unused(folder: Path, name: str) -> str:
    """``name``, or with the first number that no results in the folder have: "2031-02-03-2"."""
    unused, number = name, 1
    while (folder / f"{unused}.json").exists():
        number += 1
        unused = f"{name}-{number}"
    return unused


class Partial:
    """``<date>-partial.json`` and ``.md``: written again after each part, so that a run that is
    killed has lost one part at most. Those of an earlier run are left alone.

    Args:
        out: the results folder.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._name = ""
        self.paths: list[Path] = []

    def keep(self, results: Results) -> None:
        """Puts these results in the place of those kept before."""
        folder = self._out / results["machine"]["slug"]
        self._name = self._name or _unused(folder, f"{stem(results)}-partial")
        self.paths = _write_texts(results, folder, self._name, [])

    def drop(self) -> None:
        """Removes them: the run has ended well and its files are written."""
        with writing(self._out):
            for path in self.paths:
                path.unlink(missing_ok=True)
        self.paths = []
