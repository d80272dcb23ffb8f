"""Steps by their drafts as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]


def line(row: Row) -> str:
    """A row for the terminal."""
    return (
        f"{row['us_per_step'] / 1e3:.2f} ms a step, {row['times']:.2f} x one without; predicted"
        f" {row['predicted']:.2f} x"
    )


def tables(results: Results) -> list[str | Table]:
    """What was timed, and the table of it."""
    from rich.table import Table

    r = results
    head = (
        f"{r['model']}, {r['layers']} layers, {r['format']}, on {r['device']}, at a context of"
        f" {r['context']}; predicted for {r['predicted_for']}"
    )
    made = Table(box=None, pad_edge=False)
    for name in ("drafts", "ms a step", "p10", "p90", "x one without", "predicted", "pays from"):
        made.add_column(name, justify="right")
    for row in r["rows"]:
        least = row["pays_from"]
        made.add_row(
            str(row["drafts"]),
            *(f"{row[key] / 1e3:.2f}" for key in ("us_per_step", "us_p10", "us_p90")),
            f"{row['times']:.2f}",
            f"{row['predicted']:.2f}",
            "never" if least is None else f"{least:.0%}" if row["drafts"] else "",
        )
    return [head, made]
