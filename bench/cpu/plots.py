"""The plots of a run: roofline, latency against tokens per expert, throughput against threads,
static against dynamic scheduling under skew."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

Results = dict[str, Any]
_MARKS = {"pykernels": "o", "kt-kernel": "s", "llama.cpp": "D", "torch": "^", "numpy": "v"}


def draw(results: Results, folder: Path, stem: str) -> list[Path]:
    """Writes the PNG files; those without data are left out. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    plots = {"roofline": _roofline, "latency": _latency, "threads": _threads, "skew": _skew}
    for name, plot in plots.items():
        figure, axes = plt.subplots(figsize=(7.2, 4.6))
        if plot(results, axes):
            axes.set_title(results["machine"]["cpu"], fontsize=10)
            axes.grid(True, which="both", alpha=0.2)
            path = folder / f"{stem}-{name}.png"
            figure.tight_layout()
            figure.savefig(path, dpi=110, metadata={"Software": None})
            written.append(path)
        plt.close(figure)
    return written


def _colour(results: Results, fmt: str) -> Any:
    """One of twenty: there are more formats than the default cycle has colours."""
    from matplotlib import colormaps

    index = list(results["settings"]["formats"]).index(fmt)
    return colormaps["tab20"]((2 * index + index // 10) % 20)  # the ten dark ones first


def _roofline(results: Results, axes: Any) -> bool:
    """TFLOP/s against FLOP per byte read, under both roofs."""
    rows = [row for row in results["table"] if "why" not in row]
    if not rows:
        return False
    named: set[str] = set()
    for row in rows:
        intensity = row["tflops"] * 1e3 / row["gbps"]
        ours = row["engine"] == "pykernels"
        label = f"{row['engine']} {row['format'] if ours else ''}".strip()
        axes.scatter(
            intensity,
            row["tflops"],
            marker=_MARKS.get(row["engine"], "x"),
            color=_colour(results, row["format"]) if ours else "0.6",
            s=34 if ours else 22,
            zorder=3 if ours else 2,
            label=None if label in named else label,
        )
        named.add(label)
    read = max(row["read_roof"] for row in rows) / 1e3
    roofs = compute_roofs(rows)
    ends = [min(r["tflops"] * 1e3 / r["gbps"] for r in rows) / 2, 4e3]
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of weights", ylabel="TFLOP/s")
    axes.set_ylim(min(row["tflops"] for row in rows) / 2, max(row["tflops"] for row in rows) * 2)
    axes.plot(ends, [read * at for at in ends], color="black", lw=1, label="read roof")
    for kind, style in (("bf16", "--"), ("int8", ":")):
        if roof := roofs.get(kind):
            label = f"register-only {kind} roof"
            axes.axhline(roof, color="black", ls=style, lw=1, label=label)
            axes.set_ylim(top=max(roofs.values()) * 2)
    axes.legend(fontsize=7, ncols=2)
    return True


def compute_roofs(rows: list[dict[str, Any]]) -> dict[str, float]:
    """TFLOP/s of registers alone, of "bf16" and "int8" products: the fastest backend's."""
    found: dict[str, float] = {}
    for row in rows:
        kind = "int8" if row["backend"].endswith("/int8") else "bf16"
        if roof := row.get("compute_roof"):
            found[kind] = max(roof, found.get(kind, 0.0))
    return found


def _latency(results: Results, axes: Any) -> bool:
    """The SOSP'25 paper's Figure 7: a call's time against tokens per expert, by backend."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in results["latency"]:
        lines[row["format"], row["backend"]].append((row["per_expert"], row["ms"]))
    styles = {"amx": "-", "avx512": "--", "generic": ":"}
    for (fmt, backend), points in lines.items():
        axes.plot(
            *zip(*points, strict=True),
            styles.get(backend, "-."),
            marker=".",
            color=_colour(results, fmt),
            label=f"{fmt} {backend}",
        )
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens per expert, every expert active", ylabel="ms a call")
    for axis in (axes.xaxis, axes.yaxis):
        for ticks in ("major", "minor") if axis is axes.yaxis else ("major",):
            getattr(axis, f"set_{ticks}_formatter")("{x:g}")
    if lines:
        axes.legend(fontsize=7, ncols=2)
    return bool(lines)


def _threads(results: Results, axes: Any) -> bool:
    """GB/s of one token against threads."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    roof: dict[int, float] = defaultdict(float)
    for row in results["threads"]:
        lines[row["format"], row["engine"]].append((row["threads"], row["gbps"]))
        roof[row["threads"]] = max(roof[row["threads"]], row["read_roof"])
    for (fmt, engine), points in lines.items():
        ours = engine == "pykernels"
        axes.plot(
            *zip(*points, strict=True),
            "-" if ours else "--",
            marker="o" if ours else "s",
            color=_colour(results, fmt),
            label=f"{fmt}" if ours else f"{fmt}: {engine}",
        )
    if lines:
        counts = sorted(roof)
        axes.plot(counts, [roof[n] for n in counts], color="black", lw=1, label="read roof")
        axes.legend(fontsize=7, ncols=2)
        axes.set_xticks(counts)
    axes.set(xlabel="threads", ylabel="GB/s, one token")
    axes.set_ylim(bottom=0)
    return bool(lines)


def _skew(results: Results, axes: Any) -> bool:
    """Time of a call on the queue and on static shares, by routing, over that of balanced routing
    on the queue."""
    rows = results["skew"]
    calls = list(dict.fromkeys((row["tokens"], row["routing"]) for row in rows))
    for schedule, side in (("dynamic", -0.2), ("static", 0.2)):
        bars = [row for row in rows if row["schedule"] == schedule]
        places = [calls.index((row["tokens"], row["routing"])) + side for row in bars]
        axes.bar(places, [row["against_balanced"] for row in bars], width=0.4, label=schedule)
    if rows:
        axes.axhline(1.0, color="black", lw=1)
        names = [f"{routing}\n{tokens} tokens" for tokens, routing in calls]
        axes.set_xticks(range(len(calls)), names, fontsize=8)
        axes.legend(fontsize=7)
    axes.set(ylabel="time / balanced dynamic")
    return bool(rows)
