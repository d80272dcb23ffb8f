"""Requests beside each other as tables, beside what the paper (OSDI 2026) says of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row
from bench.papers import osdi_text as told

from .plot import figure_of
from .shares import FIRST, shares

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]


def line(row: Row) -> str:
    """A row for the terminal."""
    if row["part"] == "streams":
        return (
            f"{row['tok_s']:.1f} tokens/s, {row['itl_p50_ms']:.1f} ms from token to token; beside"
            f" prompts {row['beside_itl_p50_ms']:.1f}, at most {row['beside_itl_max_ms']:.1f}"
        )
    if row["part"] == "requests":
        parts = [f"first token {row['ttft_s']:.2f} s"] if "ttft_s" in row else []
        parts += [f"{row['tpot_ms']:.1f} ms a token"] if "tpot_ms" in row else []
        return ", ".join([*parts, f"all in {row['total_s']:.2f} s"])
    return f"first token after {row['short_s']:.2f} s, longest stall {row['stall_s']:.2f} s"


def tables(results: Results) -> list[str | Table]:
    """What was timed, and a table of each part that was."""
    r = results | {"gpu": results["gpu"] or "no GPU"}
    head = "{model}, {layers} layers, {format}; {gpu} as {device}, {threads} threads"
    found: list[str | Table] = [head.format_map(r)]
    for part, made in (("streams", _streams), ("requests", _requests), ("behind", _behind)):
        if some := [row for row in r["rows"] if row["part"] == part]:
            found.append(made(r, some))
    return found


def _streams(results: Results, rows: Sequence[Row]) -> Table:
    title = "Figure 16: sequences that decode, at {context} tokens; then beside prompts of {prompt}"
    names = ["way", "batch", "tok/s", "x", "paper", "ms", "most", "beside: ms", "x", "most"]
    made = _table(title.format_map(results), [*names, "prompt s"])
    for row in rows:
        gain = shares(rows, row, "tok_s", "batch", 1)
        paper = told.BATCH_GAIN.get(row["batch"])
        made.add_row(
            row["way"],
            str(row["batch"]),
            f"{row['tok_s']:.1f}",
            _number(gain),
            _number(paper),
            f"{row['itl_p50_ms']:.1f}",
            f"{row['itl_max_ms']:.1f}",
            f"{row['beside_itl_p50_ms']:.1f}",
            _number(row["beside_over_alone"]),
            f"{row['beside_itl_max_ms']:.1f}",
            f"{row['prompt_s']:.2f}",
        )
    return made


def _requests(results: Results, rows: Sequence[Row]) -> Table:
    title = (
        "Figure 18: requests at once (P: a prompt of {prompt} tokens, D: an answer); paper: at most"
    )
    names = [
        "way",
        "load",
        "first s",
        "x",
        "paper",
        "ms/token",
        "x",
        "paper",
        "all s",
        "x",
        "paper",
    ]
    made = _table(title.format_map(results), names)
    most = {
        "ttft_s": lambda load: _number(told.TTFT_OVER.get(load)),
        "tpot_ms": lambda load: "1" if load == "1D" else str(told.TPOT_MOST),
        "total_s": lambda load: "1" if load == "1P" else str(told.TOTAL_MOST),
    }
    for row in rows:
        cells = [row["way"], row["load"]]
        for key, digits in (("ttft_s", 2), ("tpot_ms", 1), ("total_s", 2)):
            if key not in row:
                cells += ["", "", ""]
                continue
            over = shares(rows, row, key, "load", FIRST[key])
            cells += [f"{row[key]:.{digits}f}", _number(over), most[key](row["load"])]
        made.add_row(*cells)
    return made


def _behind(results: Results, rows: Sequence[Row]) -> Table:
    title = "a request of {short} tokens behind a prompt of {behind}, and a sequence that decodes"
    names = ["way", "first token s", "most", "alone", "longest stall s", "ms/token", "prompt s"]
    made = _table(title.format_map(results), names)
    for row in rows:
        made.add_row(
            row["way"],
            f"{row['short_s']:.2f}",
            f"{row['short_most_s']:.2f}",
            f"{row['short_alone_s']:.2f}",
            f"{row['stall_s']:.2f}",
            f"{row['itl_p50_ms']:.1f}",
            f"{row['long_s']:.2f}",
        )
    return made


def _table(title: str, names: Sequence[str]) -> Table:
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in names:
        left = name in ("way", "load")
        made.add_column(name, justify="left" if left else "right", no_wrap=left)
    return made


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(results: Results, path: Path) -> None:
    """Writes the plot. Needs matplotlib."""
    figure_of(results, path)
