"""Prompts as a table, and as a plot of tokens a second by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]
SHARES = {"link_share": "of the link", "overlap": "overlap"}


def line(row: Row) -> str:
    """A row for the terminal."""
    shares = "".join(f", {row[key]:.0%} {name}" for key, name in SHARES.items() if key in row)
    return f"{row['tok_s']:.0f} tokens/s{shares}"


def tables(results: Results) -> list[str | Table]:
    """What was timed, the table of it, and the options of its peer."""
    r = results
    head = f"{r['model']}, {r['layers']} layers, {r['format']}; {r['gpu']}"
    return [head, table(r["rows"]), *settings(r["rows"])]


def table(rows: Sequence[Row]) -> Table:
    """A line for each length: tokens a second by each way, how many times a peer's ``auto`` is, and
    of the streamed prompt its share of the link and how much the link and the GPU hid of each
    other."""
    from rich.table import Table

    ways = list(dict.fromkeys(row["way"] for row in rows))
    made = Table(box=None, pad_edge=False)
    peers = [way for way in ways if any("settings" in r for r in rows if r["way"] == way)]
    for name in ("tokens", *ways, *(f"× {peer}" for peer in peers), *SHARES.values()):
        made.add_column(name, justify="right")
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        by_way = {row["way"]: row for row in rows if row["tokens"] == tokens}
        rates = [f"{by_way[way]['tok_s']:.0f}" if way in by_way else "" for way in ways]
        ours = by_way["auto"]["tok_s"] if "auto" in by_way else 0
        timed = [way if ours and way in by_way else None for way in peers]
        times = [f"{ours / by_way[way]['tok_s']:.1f}" if way else "" for way in timed]
        streamed = by_way.get("stream", {})
        shares = [f"{streamed[key]:.0%}" if key in streamed else "" for key in SHARES]
        made.add_row(str(tokens), *rates, *times, *shares)
    return made


def settings(rows: Sequence[Row]) -> list[str]:
    """A line for each row of a peer: the options that it had."""
    return [f"{r['way']}, {r['tokens']} tokens: {r['settings']}" for r in rows if "settings" in r]


def draw(results: Results, path: Path) -> None:
    """Writes the plot. Needs matplotlib."""
    rows = results["rows"]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for way in dict.fromkeys(row["way"] for row in rows):
        way_rows = [row for row in rows if row["way"] == way]
        axes.plot(
            [r["tokens"] for r in way_rows], [r["tok_s"] for r in way_rows], marker="o", label=way
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="tokens/s")
    axes.set_title("{model} {format}, {gpu}".format_map(results), fontsize=9)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)
