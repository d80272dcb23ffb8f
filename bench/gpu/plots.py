"""A run as one picture: the roofline, and every case's share of its roof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import title

Results = dict[str, Any]


def draw(results: Results, path: Path) -> bool:
    """Writes the PNG; False if there is nothing to show. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["rows"] if "why" not in row]
    if not rows:
        return False
    ops = list(dict.fromkeys(row["op"] for row in rows))
    rows.sort(key=lambda row: ops.index(row["op"]))
    colours = {op: f"C{i}" for i, op in enumerate(ops)}
    high = 6.0, 0.8 + 0.13 * len(rows)  # inches
    figure = plt.figure(figsize=(11, sum(high)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=high)  # the names need no room above
    roofline, bars = above.subplots(), below.subplots()
    _roofline(roofline, results, [row for row in rows if row["flops"]], colours)
    places = range(len(rows))
    bars.barh(places, [row["roof_share"] for row in rows], color=[colours[r["op"]] for r in rows])
    bars.set_yticks(places, [title(row) for row in rows], fontsize=5)
    bars.set_ylim(len(rows) - 0.4, -0.6)
    bars.set(xlabel="share of the case's own roof", xlim=(0, 1.05))
    for axes in (roofline, bars):
        axes.grid(True, which="both", alpha=0.2)
    figure.suptitle(results["machine"]["gpu"], fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)
    return True


def _roofline(axes: Any, results: Results, rows: list[Any], colours: dict[str, str]) -> None:
    """TFLOP/s against operations a byte, under the roofs; the legend is the bars' too."""
    from matplotlib.patches import Patch

    roofs = results["roofs"]
    for row in rows:
        axes.scatter(row["flops"] / row["nbytes"], row["tflops"], s=22, color=colours[row["op"]])
    read, matmul = roofs["read_gbps"] / 1e3, roofs["matmul_tflops"]
    least = min((row["flops"] / row["nbytes"] for row in rows), default=1) / 2
    knee, most = matmul / read, max(4e3, 2 * matmul / read)
    axes.plot([least, knee, most], [least * read, matmul, matmul], color="black", lw=1)
    axes.plot([2 * knee, most], [2 * matmul, 2 * matmul], color="black", lw=1, ls="--")
    axes.plot([knee, 2 * knee], [matmul, 2 * matmul], color="black", lw=1, ls="--")
    axes.text(knee, matmul, f" {matmul:.0f} TFLOP/s bf16", va="bottom", fontsize=7)
    axes.text(2 * knee, 2 * matmul, " FP8: twice that", va="bottom", fontsize=7)
    axes.text(least, least * read, f" {read * 1e3:.0f} GB/s read", va="bottom", fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    if rows:
        axes.set_ylim(max(min(row["tflops"] for row in rows) / 2, 1e-5), matmul * 4)
    axes.legend(handles=[Patch(color=c, label=op) for op, c in colours.items()], fontsize=7)
