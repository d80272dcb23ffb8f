"""The plot of requests beside each other: a panel for each part that was timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.timing.rows import Row
from bench.papers import osdi_text as told

from .shares import FIRST, shares

Results = dict[str, Any]
_TITLES = {"ttft_s": "first token", "tpot_ms": "each token", "total_s": "all"}


def figure_of(results: Results, path: Path) -> None:
    """Writes it. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = {
        part: [row for row in results["rows"] if row["part"] == part]
        for part in ("streams", "requests", "behind")
    }
    panels = []
    if parts["streams"]:
        panels += [(1.0, _gains, parts["streams"]), (1.2, _gaps, parts["streams"])]
    if parts["requests"]:
        panels.append((1.9, _loads, parts["requests"]))
    if parts["behind"]:
        panels.append((0.8, _behind, parts["behind"]))
    widths = [width for width, _, _ in panels]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1.0 + 3.4 * sum(widths), 3.9),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"width_ratios": widths},
    )
    ways = list(dict.fromkeys(row["way"] for row in results["rows"]))
    for axis, (_, drawn, rows) in zip(axes[0], panels, strict=True):
        drawn(axis, rows, ways, results)
        axis.grid(True, axis="y", alpha=0.2)
        axis.legend(fontsize=7, ncols=4 if drawn is _loads else 1)
        axis.set_title(axis.get_title(), fontsize=9)
    gpu = results["gpu"] or "no GPU"
    figure.suptitle(f"{results['model']} {results['format']}, {gpu}", fontsize=9)
    figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def _gains(axes: Any, rows: Sequence[Row], ways: Sequence[str], results: Results) -> None:
    """Tokens a second over those of one sequence."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for i, way, x in _places(ways, len(batches)):
        own = {row["batch"]: row for row in rows if row["way"] == way}
        high = [
            shares(rows, own[b], "tok_s", "batch", 1) or 0.0 if b in own else 0.0 for b in batches
        ]
        axes.bar(x, high, 0.8 / len(ways), color=f"C{i}", label=way)
        for at, batch, share in zip(x, batches, high, strict=True):
            if share:
                axes.text(
                    at, share, f"{own[batch]['tok_s']:.0f}", ha="center", va="bottom", fontsize=6
                )
    known = [(n, told.BATCH_GAIN[b]) for n, b in enumerate(batches) if b in told.BATCH_GAIN]
    if known:
        axes.plot(*zip(*known, strict=True), "k_", ms=18, mew=1.5, label="paper")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set(xlabel="sequences", ylabel="tokens/s over one sequence", title="decode (Figure 16)")


def _gaps(axes: Any, rows: Sequence[Row], ways: Sequence[str], results: Results) -> None:
    """From token to token beside prompts: the median as a bar, the longest as a mark."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for i, way, x in _places(ways, len(batches)):
        own = {row["batch"]: row for row in rows if row["way"] == way}
        there = [(at, own[b]) for at, b in zip(x, batches, strict=True) if b in own]
        at = [place for place, _ in there]
        width = 0.8 / len(ways)
        axes.bar(at, [r["beside_itl_p50_ms"] for _, r in there], width, color=f"C{i}", label=way)
        axes.plot(at, [r["itl_p50_ms"] for _, r in there], "k_", ms=60 * width, mew=1.5)
        axes.plot(at, [r["beside_itl_max_ms"] for _, r in there], "v", color=f"C{i}", mec="k", ms=5)
    axes.plot([], [], "k_", ms=12, label="median alone")
    axes.plot([], [], "v", color="w", mec="k", ms=5, label="longest beside")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set(xlabel="sequences", ylabel="ms from token to token", yscale="log")
    axes.set_title(f"beside prompts of {results['prompt']} tokens")


def _loads(axes: Any, rows: Sequence[Row], ways: Sequence[str], results: Results) -> None:
    """Figure 18: each load over that of one request."""
    groups = [
        (key, load)
        for key in _TITLES
        for load in dict.fromkeys(row["load"] for row in rows)
        if any(key in row for row in rows if row["load"] == load)
    ]
    for i, way, x in _places(ways, len(groups)):
        own = {row["load"]: row for row in rows if row["way"] == way}
        high = [
            shares(rows, own[load], key, "load", FIRST[key]) or 0.0 if load in own else 0.0
            for key, load in groups
        ]
        axes.bar(x, high, 0.8 / len(ways), color=f"C{i}", label=way)
    mosts = {
        "tpot_ms": told.TPOT_MOST,
        "total_s": told.TOTAL_MOST,
        "ttft_s": told.TTFT_OVER["1P+2D"],
    }
    label: str | None = "paper, at most"
    for key, most in mosts.items():
        places = [n for n, (each, _) in enumerate(groups) if each == key]
        if places:
            axes.plot([places[0] - 0.4, places[-1] + 0.4], [most, most], "k--", lw=1, label=label)
            label = None
    names = [f"{load}" for _, load in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7, rotation=45)
    for key, title in _TITLES.items():
        places = [n for n, (each, _) in enumerate(groups) if each == key]
        if places:
            middle = (places[0] + places[-1]) / 2
            above = axes.get_xaxis_transform()  # data along x, a share of the height along y
            axes.text(middle, 0.86, title, ha="center", va="top", fontsize=8, transform=above)
    axes.set(ylabel="over one request", title="requests at once (Figure 18)")
    axes.set_ylim(0, 1.35 * max(axes.get_ylim()[1], 1.8))


def _behind(axes: Any, rows: Sequence[Row], ways: Sequence[str], results: Results) -> None:
    columns = {"short_s": "first token", "stall_s": "longest stall"}
    for i, way, x in _places(ways, len(columns)):
        own = [row for row in rows if row["way"] == way]
        if own:
            high = [own[0][column] for column in columns]
            bars = axes.bar(x, high, 0.8 / len(ways), color=f"C{i}", label=way)
            axes.bar_label(bars, fmt="%.2f", fontsize=6)
    axes.set_xticks(range(len(columns)), columns.values(), fontsize=8)
    axes.set(ylabel="s", title=f"behind a prompt of {results['behind']}")


def _places(ways: Sequence[str], count: int) -> list[tuple[int, str, list[float]]]:
    """By way, the middles of its bars, one in each of so many groups."""
    width = 0.8 / len(ways)
    return [
        (i, way, [n - 0.4 + width * (i + 0.5) for n in range(count)]) for i, way in enumerate(ways)
    ]
