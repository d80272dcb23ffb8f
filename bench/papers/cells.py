"""Cells of the papers' tables and figures: what a paper says, what was simulated, what was measured
here, and which is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FIT = (
    "Rates of kernels by core, launches and hops, which no paper publishes, are estimates, and some"
    " were changed after they had been compared: the errors are those of a fit, not of a forecast."
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
        simulated, measured: ours; None: not.
    """

    figure: str
    what: str
    unit: str
    paper: float | None = None
    simulated: float | None = None
    measured: float | None = None
    says: str = ""

    @property
    def error(self) -> float | None:
        """How far the simulated value is from the paper's, as a share; None: that is a bound."""
        if self.paper is None or self.simulated is None or self.says in (LESS, MORE):
            return None
        return self.simulated / self.paper - 1


def page(title: str, about: Sequence[str], cells: Sequence[Cell], plot: str) -> str:
    """Cells as Markdown."""
    found = [abs(cell.error) for cell in cells if cell.error is not None]
    text = [f"# {title}", "", *about, ""]
    text += [
        "Paper: the value in its text (what is only drawn has none). Simulated: by"
        " `runtime/devices/sim`, of our own program on the paper's machine, which is a file in"
        " [bench/machines](../../machines). Measured: on a machine of ours, which is named.",
        "",
    ]
    if found:
        text += [
            f"**{len(found)} values of the paper beside simulated ones: median error"
            f" {median(found):.1%}, worst {max(found):.1%}.**",
            "",
        ]
    text += [f"![{plot}]({plot})", ""]
    for figure in dict.fromkeys(cell.figure for cell in cells):
        text += [f"## {figure}", "", "| | unit | paper | simulated | measured | error |"]
        text += ["|---|---|---:|---:|---:|---:|"]
        for cell in (each for each in cells if each.figure == figure):
            error = "" if cell.error is None else f"{cell.error:+.1%}"
            paper = "" if cell.paper is None else f"{cell.says} {_number(cell.paper)}".strip()
            text.append(
                f"| {cell.what} | {cell.unit} | {paper} | {_number(cell.simulated)} |"
                f" {_number(cell.measured)} | {error} |"
            )
        text.append("")
    return "\n".join(text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Bars of the paper's values beside simulated ones, one panel a unit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    both = [cell for cell in cells if cell.paper is not None and cell.simulated is not None]
    units = list(dict.fromkeys(cell.unit for cell in both))
    height = 1.0 + 0.36 * len(both)
    figure, axes = plt.subplots(
        len(units),
        1,
        figsize=(9, height + 0.8 * len(units)),
        squeeze=False,
        gridspec_kw={"height_ratios": [sum(c.unit == u for c in both) for u in units]},
    )
    for axis, unit in zip(axes[:, 0], units, strict=True):
        own = [cell for cell in both if cell.unit == unit]
        places = range(len(own))
        axis.barh([p - 0.2 for p in places], [c.paper or 0 for c in own], 0.38, label="paper")
        axis.barh(
            [p + 0.2 for p in places], [c.simulated or 0 for c in own], 0.38, label="simulated"
        )
        names = [f"{cell.figure}: {cell.what}" for cell in own]
        axis.set_yticks(list(places), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
