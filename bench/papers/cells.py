"""Cells of the papers' tables and figures: what a paper says, what was simulated, what was measured
here, and which is which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

from .rows import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIT = (
    "Rates of kernels by core and hops, which no paper publishes, are estimates, and some were"
    " changed after they had been compared; which published number stands for a program's launches,"
    " its link or its memory was chosen with the errors in view, too: they are those of a fit, not"
    " of a forecast."
)
"""What every page says of its constants."""
LESS, MORE, ABOUT = "up to", "over", "about"


@dataclass(frozen=True)
class Cell:
    """One number.

    Attributes:
        figure: of the paper; ``what``: it is of; ``unit``: "tok/s", "x", "s", "%".
        paper: its own value, as its text has it; None: it is drawn alone.
        says: how the text gives it: "", ``LESS``, ``MORE`` or ``ABOUT``.
        simulated, measured: ours; None: not. ``file``: of results, where it was measured.
        given: whether the simulated machine was made from the paper's value.
    """

    figure: str
    what: str
    unit: str
    paper: float | None = None
    simulated: float | None = None
    measured: float | None = None
    says: str = ""
    file: str = ""
    given: bool = False

    @property
    def error(self) -> float | None:
        """How far the simulated value is from the paper's, as a share; None: that is a bound, or
        what the simulated one was made from."""
        if self.paper is None or self.simulated is None or self.says in (LESS, MORE) or self.given:
            return None
        return self.simulated / self.paper - 1


def counted(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that tell how good the simulator is, the worst first."""
    found = [cell for cell in cells if cell.error is not None]
    return sorted(found, key=lambda cell: -abs(cell.error or 0.0))


def page(
    title: str,
    about: Sequence[str],
    cells: Sequence[Cell],
    plot: str,
    unexplained: Sequence[str] = (),
) -> str:
    """Cells as Markdown.

    Args:
        unexplained: what is known of the rows that are far off.
    """
    text = [f"# {title}", "", *about, ""]
    text += [
        "Paper: the value in its text (what is only drawn has none). Simulated: by"
        " `runtime/devices/sim` on the paper's machine, which is a file in"
        " [bench/machines](../../machines). Measured: in a committed run of ours on another"
        " machine, which is linked; its sizes are not the paper's unless it says so.",
        "",
    ]
    far = counted(cells)
    if far:
        off = [abs(cell.error or 0.0) for cell in far]
        text += [
            f"**{len(far)} values of the paper beside simulated ones: median error"
            f" {median(off):.1%}, worst {max(off):.1%}.** {_shares(cells)}",
            "",
            "The farthest: "
            + "; ".join(f"{cell.figure}, {cell.what} ({cell.error:+.0%})" for cell in far[:5])
            + ".",
            "",
        ]
    if unexplained:
        text += ["What is not explained:", "", *(f"- {each}" for each in unexplained), ""]
    text += [f"![{plot}]({plot})", ""]
    for figure in dict.fromkeys(cell.figure for cell in cells):
        own = [cell for cell in cells if cell.figure == figure]
        text += [f"## {figure}", "", "| | unit | paper | simulated | error | measured | in |"]
        text += ["|---|---|---:|---:|---:|---:|---|", *map(_line, own), ""]
    return "\n".join(text)


def _shares(cells: Sequence[Cell]) -> str:
    """How many cells are of which kind."""
    simulated = sum(cell.simulated is not None for cell in cells)
    measured = sum(cell.measured is not None for cell in cells)
    return f"Of {len(cells)} cells {simulated} are simulated and {measured} are measured."


def _line(cell: Cell) -> str:
    error = "" if cell.error is None else f"{cell.error:+.1%}"
    if cell.given:
        error = "given"
    paper = "" if cell.paper is None else f"{cell.says} {_number(cell.paper)}".strip()
    where = f"[{Path(cell.file).parent.name}](../{cell.file})" if cell.file else ""
    return (
        f"| {cell.what} | {cell.unit} | {paper} | {_number(cell.simulated)} | {error} |"
        f" {_number(cell.measured)} | {where} |"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def file_of(path: Path) -> str:
    """A file of results as ``Cell.file`` has it."""
    return str(path.relative_to(RESULTS))


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Bars of simulated and measured values, the paper's beside them: a panel for each unit of each
    figure, in two columns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ends, places = [_HEAD, _HEAD], list[tuple[int, float, str, list[Cell]]]()
    for title, own in _panels(cells):
        column = ends.index(min(ends))
        places.append((column, ends[column], title, own))
        ends[column] += len(own) * _ROW + _GAP
    height = max(ends)
    figure = plt.figure(figsize=(17, height))
    for column, top, title, own in places:
        tall = len(own) * _ROW
        box = (0.2 + 0.5 * column, 1 - (top + tall) / height, 0.28, tall / height)
        _bars(figure.add_axes(box), title, own)
    names = ("paper", "simulated", "measured here")
    handles = [
        Patch(color=colour, label=name)
        for name, colour in zip(names, _COLOURS.values(), strict=True)
    ]
    figure.legend(handles=handles, fontsize=9, ncols=3, loc="upper center")
    figure.savefig(file, dpi=100)
    plt.close(figure)


_ROW, _GAP, _HEAD = 0.24, 0.6, 0.7
"""Inches: of a cell; of a panel besides; above all."""
_COLOURS = {"paper": "#888888", "simulated": "#1f77b4", "measured": "#2ca02c"}


def _panels(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    ours = [cell for cell in cells if (cell.simulated, cell.measured) != (None, None)]
    for figure, unit in dict.fromkeys((cell.figure, cell.unit) for cell in ours):
        own = [cell for cell in ours if (cell.figure, cell.unit) == (figure, unit)]
        yield f"{figure}, {unit}", own


def _bars(axis: Axes, title: str, own: Sequence[Cell]) -> None:
    for row, cell in enumerate(own):
        values = {key: getattr(cell, key) for key in _COLOURS}
        there = {key: value for key, value in values.items() if value is not None}
        width = 0.84 / max(1, len(there))
        for i, (key, value) in enumerate(there.items()):
            place = row - 0.42 + width * (i + 0.5)
            axis.barh(place, value, width, color=_COLOURS[key])
            axis.text(value, place, f" {_number(value)}", fontsize=6, va="center")
    axis.set_yticks(range(len(own)), [fill(cell.what, 48) for cell in own], fontsize=7)
    axis.set_ylim(len(own) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.set_title(title, fontsize=8, loc="left", pad=3)
    axis.tick_params(axis="x", labelsize=6)
