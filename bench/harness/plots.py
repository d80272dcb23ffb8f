"""The plots of a run: the roofline with every case's share of its roof; of the experts also latency
against tokens per expert, and throughput against threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.tables.ablation import OP, bars
from bench.tables.e2e import is_whole
from bench.tables.e2e_plot import speeds

from .timing.rows import Row, title

Results = dict[str, Any]
_MARKS = {"kt-kernel": "s", "llama.cpp": "D", "torch": "^", "numpy": "v"}


def draw(results: Results, folder: Path, stem: str) -> list[Path]:
    """Writes the PNG files; those without data are left out. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in results["rows"] if "why" not in row]
    rows = [row for row in timed if not is_whole(row) and row["op"] != OP]
    curves = ("latency", "threads")
    plots = {
        "-speeds": (speeds, [row for row in timed if is_whole(row)]),
        "-stages": (bars, [row for row in timed if row["op"] == OP]),
        "": (_cases, [row for row in rows if not row["op"].startswith(curves)]),
        "-latency": (_latency, [row for row in rows if row["op"].startswith("latency")]),
        "-threads": (_threads, [row for row in rows if row["op"].startswith("threads")]),
    }
    written = []
    for name, (plot, shown) in plots.items():
        if shown:
            figure = plot(plt, shown)
            figure.suptitle(results["machine"]["name"], fontsize=10)
            for axes in figure.axes:
                axes.grid(True, which="both", alpha=0.2)
            path = folder / f"{stem}{name}.png"
            figure.savefig(path, dpi=90, metadata={"Software": None})
            plt.close(figure)
            written.append(path)
    return written


def _colours(ops: Iterable[str]) -> dict[str, Any]:
    """One of twenty for each op, or each format: more than the default cycle has."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(ops))  # the ten dark ones first
    return {name: colormaps["tab20"]((2 * i + i // 10) % 20) for i, name in enumerate(names)}


def _cases(plt: Any, rows: list[Row]) -> Any:
    """TFLOP/s against operations a byte, under the roofs; below a bar for each case of ours."""
    from matplotlib.patches import Patch

    colours = _colours(row["op"] for row in rows)
    ours = [row for row in rows if "engine" not in row]
    ours.sort(key=lambda row: list(colours).index(row["op"]))
    high = 6.0, 0.8 + 0.13 * len(ours)  # inches
    figure = plt.figure(figsize=(11, sum(high)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=high)  # the names need no room above
    roofline, bars = above.subplots(), below.subplots()
    _roofline(roofline, [row for row in rows if row["flops"]], colours)
    roofline.legend(handles=[Patch(color=c, label=op) for op, c in colours.items()], fontsize=7)
    at = range(len(ours))
    bars.barh(at, [row["roof_share"] for row in ours], color=[colours[r["op"]] for r in ours])
    bars.set_yticks(at, [title(row) for row in ours], fontsize=5)
    bars.set_ylim(len(ours) - 0.4, -0.6)
    bars.set(xlabel="share of the case's own roof", xlim=(0, 1.05))
    return figure


def _roofline(axes: Any, rows: list[Row], colours: dict[str, Any]) -> None:
    """Peers are grey, with a mark for each engine."""
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    if not rows:
        return
    for row in rows:
        engine = row.get("engine", "")
        axes.scatter(
            row["flops"] / row["nbytes"],
            row["tflops"],
            s=22,
            marker=_MARKS.get(engine, "o"),
            color="0.6" if engine else colours[row["op"]],
            zorder=2 if engine else 3,
        )
    read = max(row["read_roof_gbps"] for row in rows) / 1e3
    least = min(row["flops"] / row["nbytes"] for row in rows) / 2
    roofs: dict[str, float] = {}
    for row in rows:
        if roof := row["compute_roof_tflops"]:
            roofs[row["compute"]] = max(roof, roofs.get(row["compute"], 0.0))
    top = max(roofs.values(), default=max(row["tflops"] for row in rows))
    most = max(4e3, 2 * top / read)
    axes.plot([least, top / read], [least * read, top], color="black", lw=1)
    axes.text(least, least * read, f" {read * 1e3:.0f} GB/s read", va="bottom", fontsize=7)
    for name, roof in roofs.items():
        axes.plot([roof / read, most], [roof, roof], color="black", lw=1)
        axes.text(roof / read, roof, f" {roof:.3g} TFLOP/s {name}", va="bottom", fontsize=7)
    axes.set_ylim(max(min(row["tflops"] for row in rows) / 2, 1e-5), top * 4)


def _lines(rows: list[Row], x: str, y: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Points by (format, name)."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        lines[row["format"], row["name"]].append((row[x], row[y]))
    return lines


def _latency(plt: Any, rows: list[Row]) -> Any:
    """The SOSP'25 paper's Figure 7: a call's time against tokens per expert, by backend."""
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    styles, colours = {"amx": "-", "avx512": "--"}, _colours(row["format"] for row in rows)
    for (fmt, name), points in _lines(rows, "per_expert", "us_median").items():
        style = styles.get(name.removeprefix("pykernels "), ":")
        axes.plot(
            *zip(*points, strict=True), style, marker=".", color=colours[fmt], label=f"{fmt} {name}"
        )
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens per expert, every expert active", ylabel="us a call")
    axes.legend(fontsize=7, ncols=2)
    return figure


def _threads(plt: Any, rows: list[Row]) -> Any:
    """GB/s of one token against threads."""
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    colours, roof = _colours(row["format"] for row in rows), defaultdict[int, float](float)
    for row in rows:
        roof[row["threads"]] = max(roof[row["threads"]], row["read_roof_gbps"])
    peers = {row["name"] for row in rows if "engine" in row}
    for (fmt, name), points in _lines(rows, "threads", "gbps").items():
        style, mark = ("--", "s") if name in peers else ("-", "o")
        axes.plot(
            *zip(*points, strict=True),
            style,
            marker=mark,
            color=colours[fmt],
            label=f"{fmt} {name}",
        )
    counts = sorted(roof)
    axes.plot(counts, [roof[n] for n in counts], color="black", lw=1, label="read roof")
    axes.set_xticks(counts)
    axes.set(xlabel="threads", ylabel="GB/s, one token")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, ncols=2)
    return figure
