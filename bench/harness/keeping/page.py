"""Results of a command of ``pykernels bench`` as a page: its tables as Markdown, its plot, and how
they were made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .kept import name_of, table_of

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]


def page(results: Results, plot: str = "") -> str:
    """The page.

    Args:
        plot: its name beside the page; "": there is none.
    """
    timed = {**results, "rows": [row for row in results["rows"] if "why" not in row]}
    lines = [f"# pykernels bench {results['bench']}", "", *_made(results), ""]
    if plot:
        lines += [f"![{results['bench']}]({plot})", ""]
    for shown in table_of(results["bench"]).tables(timed) if timed["rows"] else []:
        lines += [*([shown] if isinstance(shown, str) else _markdown(shown)), ""]
    for row in results["rows"]:
        if "why" in row:
            named = {key: value for key, value in row.items() if key != "why"}
            lines += [f"Not measured: {name_of([], named)}: {row['why']}", ""]
    if not results["complete"]:
        names = ", ".join(name_of([], row) for row in results["missing"])
        lines += [f"Missing{': ' + results['why'] if results['why'] else ''}: {names}.", ""]
    return "\n".join(lines)


def _made(results: Results) -> list[str]:
    """Where, when and by which command."""
    changed = ", with changes to it" if results["dirty"] else ""
    gpu = f" and {results['gpu']}" if results["gpu"] else ""
    return [
        f"On {results['cpu']}{gpu}, {results['date']}, commit {results['commit']}{changed};"
        f" {results['versions']}.",
        "",
        f"    {results['command']}",
    ]


def _markdown(table: Table) -> list[str]:
    """A table's title, and its rows."""
    heads = [str(column.header) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    cells = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    title = [f"## {table.title}", ""] if table.title else []
    return [*title, *map(_row, [heads, rules, *cells])]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_page(results: Results, path: Path) -> list[Path]:
    """Writes the page and, where the benchmark has one, its plot beside it; the paths written.

    Raises:
        PykernelsError: one of them cannot be written.
    """
    from .whole import write_whole

    timed = {**results, "rows": [row for row in results["rows"] if "why" not in row]}
    table, plot = table_of(results["bench"]), path.with_suffix(".png")
    drawn = hasattr(table, "draw") and bool(timed["rows"])
    if drawn:
        table.draw(timed, plot)
    write_whole(path, page(results, plot.name if drawn else ""))
    return [path, *([plot] if drawn else [])]
