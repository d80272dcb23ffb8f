"""Decode by context as a table, and as a plot of measured and predicted milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]


def line(row: Row) -> str:
    """A row for the terminal."""
    text = f"{row['us_per_step'] / 1e3:.2f} ms a step, {row['tok_s']:.1f} tok/s"
    if "predicted_us" in row:
        text += f"; predicted {row['predicted_us'] / 1e3:.2f} ms ({row['error']:+.1%})"
    return text


def tables(results: Results) -> list[str | Table]:
    """What was timed, and the table of it."""
    from rich.table import Table

    r = results
    head = (
        f"{r['model']}, {r['layers']} layers, {r['format']}, cache in {r['kv_dtype']}, on"
        f" {r['device']}; predicted for {r['predicted_for']}"
    )
    made = Table(box=None, pad_edge=False)
    for name in ("defer", "batch", "context", "tok/s", "ms a step", "predicted", "error"):
        made.add_column(name, justify="right")
    made.add_column("bound by")
    for row in r["rows"]:
        ms, told = f"{row['us_per_step'] / 1e3:.2f}", ["", "", ""]
        if "predicted_us" in row:
            told = [f"{row['predicted_us'] / 1e3:.2f}", f"{row['error']:+.1%}", row["bound"]]
        defer = f"auto: {row['deferred']}" if row["defer"] == "auto" else row["defer"]
        sizes = str(row["batch"]), str(row["context"])
        made.add_row(defer, *sizes, f"{row['tok_s']:.1f}", ms, *told)
    return [head, made]


def draw(results: Results, path: Path) -> None:
    """Writes the plot. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    engines = dict.fromkeys((row["defer"], row["batch"]) for row in results["rows"])
    for number, (defer, batch) in enumerate(engines):
        own = [row for row in results["rows"] if (row["defer"], row["batch"]) == (defer, batch)]
        at = [row["context"] for row in own]
        color, name = f"C{number}", f"batch {batch}, defer {defer}"
        axes.plot(at, [row["us_per_step"] / 1e3 for row in own], "o-", color=color, label=name)
        told = [row for row in own if "predicted_us" in row]
        times = [row["predicted_us"] / 1e3 for row in told]
        axes.plot([row["context"] for row in told], times, "x--", color=color)
    axes.set(xlabel="tokens of the context", ylabel="ms a step; dashed: predicted")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_title("{model} {format}, {predicted_for}".format_map(results), fontsize=9)
    axes.grid(True, alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)
