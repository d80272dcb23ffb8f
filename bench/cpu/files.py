"""The files of a run: JSON, the Markdown page, plots; and what is kept of one that ends early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cases import SECTIONS
from .plots import draw
from .report import markdown

Results = dict[str, Any]


def stem(results: Results) -> str:
    """Name of a run's files, without what comes after: "2031-02-03", "2031-02-03-quick-skew".

    A run of some sections never takes the place of a whole one."""
    day, settings = results["machine"]["date"].split()[0], results["settings"]
    chosen = settings["sections"]
    some = [] if len(chosen) == len(SECTIONS) else chosen
    return "-".join([day, *(["quick"] if settings["quick"] else []), *some])


def write(results: Results, out: Path) -> list[Path]:
    """JSON, the page and plots, in the folder of the machine; the paths written."""
    return _write(results, out / results["machine"]["slug"], stem(results), plots=True)


class Partial:
    """``<date>-partial.json`` and ``.md``: written again after each part, so that a run that is
    killed has lost one part at most. Those of an earlier run are left alone.

    Args:
        out: the results folder.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._stem = out, ""
        self.paths: list[Path] = []

    def keep(self, results: Results) -> None:
        """Puts these results in the place of those kept before."""
        folder = self._out / results["machine"]["slug"]
        if not self._stem:
            first = f"{stem(results)}-partial"
            self._stem, number = first, 1
            while (folder / f"{self._stem}.json").exists():
                number += 1
                self._stem = f"{first}-{number}"
        self.paths = _write(results, folder, self._stem, plots=False)

    def drop(self) -> None:
        """Removes them: the run has ended well and its files are written."""
        for path in self.paths:
            path.unlink()
        self.paths = []


def _write(results: Results, folder: Path, name: str, plots: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(results, folder, name) if plots else []
    texts = {
        "json": json.dumps(results, indent=1) + "\n",
        "md": markdown(results, [path.name for path in drawn]),
    }
    paths = []
    for ending, text in texts.items():
        path, new = folder / f"{name}.{ending}", folder / f"{name}.{ending}.new"
        new.write_text(text)
        new.replace(path)  # whole at any moment
        paths.append(path)
    return [*paths, *drawn]
