"""Loading as a table, beside plain reading of the same files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

if TYPE_CHECKING:
    from rich.table import Table


def line(row: Row) -> str:
    """A row for the terminal."""
    times = [f", {key} {row[f'{key}_s']:.2f} s" for key in ("cold", "warm") if f"{key}_s" in row]
    return f"{row['bytes'] / 1e9:.2f} GB{''.join(times)}"


def tables(results: dict[str, Any]) -> list[Table]:
    """Seconds and rates of each way, beside plain reading."""
    from rich.table import Column, Table

    table = Table(Column("", no_wrap=True), box=None, pad_edge=False)
    for title in (
        "GB",
        "cold s",
        "GB/s",
        "x reading",
        "warm s",
        "GB/s",
        "x reading",
        "peak GB",
        "final GB",
    ):
        table.add_column(title, justify="right")
    keys = ("cold_s", "cold_gbps", "cold_over_reading", "warm_s", "warm_gbps", "warm_over_reading")
    for row in results["rows"]:
        sizes = (
            f"{row[key] / 1e9:.2f}" if key in row else "" for key in ("peak_bytes", "final_bytes")
        )
        figures = (f"{row[key]:.2f}" if key in row else "" for key in keys)
        table.add_row(row["what"], f"{row['bytes'] / 1e9:.2f}", *figures, *sizes)
    return [table]
