"""The files of a run: JSON, the Markdown page, plots; and what is kept of one that ends early."""

from __future__ import annotations

from pathlib import Path

from bench.files import Partial, Results, unused, write_texts, writing

from .cases import SECTIONS
from .plots import draw
from .report import markdown


def stem(results: Results) -> str:
    """Name of a run's files, without what comes after: "2031-02-03", "2031-02-03-quick-skew"."""
    day, settings = results["machine"]["date"].split()[0], results["settings"]
    chosen = settings["sections"]
    some = [] if len(chosen) == len(SECTIONS) else chosen
    return "-".join([day, *(["quick"] if settings["quick"] else []), *some])


def write(results: Results, out: Path) -> list[Path]:
    """JSON, the page and plots, in the folder of the machine; the paths written.

    A run never takes the place of another: the second of a day has a number.
    """
    folder = out / results["machine"]["slug"]
    name = unused(folder, stem(results))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        drawn = draw(results, folder, name)
    page = markdown(results, [path.name for path in drawn])
    return [*write_texts(results, folder, name, page), *drawn]


def partial(out: Path) -> Partial:
    """What keeps the rows of a run while it goes on."""
    return Partial(out, stem, lambda results: markdown(results, []))
