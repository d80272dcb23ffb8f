"""A prompt in parallel with streams as a table: an engine without a cap, and one with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

NAMED = "target_itl_ms"
"""The column that names a row; "": no cap."""


def line(row: Row) -> str:
    """A row for the terminal."""
    return (
        f"{row['itl_alone_p50_ms']:.1f} ms from token to token, {row['itl_mixed_p50_ms']:.1f}"
        f" beside the prompt, whose first token took {row['ttft_s']:.2f} s"
    )


def tables(results: dict[str, Any]) -> list[str | Table]:
    """What was timed, and the table of it."""
    from rich.table import Column, Table

    head = (
        "{model}, {layers} layers, {format}, {threads} threads on {device}: {streams} streams at"
        " {context} tokens, then a prompt of {prompt}"
    )
    table = Table(Column("engine", no_wrap=True), box=None, pad_edge=False)
    for title in ("p50 ms", "p99 ms", "p50 beside", "p99 beside", "max", "TTFT s", "alone"):
        table.add_column(title, justify="right")
    for row in results["rows"]:
        target = row[NAMED]
        times = [
            row[f"itl_{name}_ms"]
            for name in ("alone_p50", "alone_p99", "mixed_p50", "mixed_p99", "mixed_max")
        ]
        table.add_row(
            f"target {target:g} ms" if target else "no cap",
            *(f"{value:.1f}" for value in times),
            f"{row['ttft_s']:.2f}",
            f"{row['ttft_alone_s']:.2f}",
        )
    return [head.format_map(results), table]
