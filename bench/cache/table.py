"""Rows of a cache of experts as tables, and as plots like SMOE's Figures 10 and 14."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]
TTFT = "ttft_ms_"


def line(row: Row) -> str:
    """A row for the terminal."""
    cells = _cells(row)
    return ", ".join(f"{name} {text}" for name, text in cells.items() if name not in _NAMES)


def tables(results: Results) -> list[str | Table]:
    """What was recorded, the simulated hits, then what an engine was timed at."""
    head = (
        "{model}, {layers} layers, {experts} experts, top-{topk};"
        " {texts} texts of {prompt} + {tokens} tokens"
    )
    return [head.format_map(results), *_tables(results["rows"])]


def _tables(rows: Sequence[Row]) -> list[Table]:
    from rich.table import Table

    tables = list[Table]()
    for kind, title in (("simulated", "simulated"), ("measured", "on the GPU")):
        kind_rows = [row for row in rows if row["kind"] == kind]
        if not kind_rows:
            continue
        made = Table(box=None, pad_edge=False, title=title, title_justify="left")
        cells = [_cells(row) for row in kind_rows]
        heads = list(dict.fromkeys(name for row in cells for name in row))
        for name in heads:
            made.add_column(name, justify="left" if name == "policy" else "right")
        for row in cells:
            made.add_row(*(row.get(name, "") for name in heads))
        tables.append(made)
    return tables


_NAMES = ("slots", "policy", "swaps")


def _cells(row: Row) -> dict[str, str]:
    cells = {
        "slots": f"{row['slots']} ({row['share']:.0%})",
        "policy": row["policy"],
        "swaps": str(row["swaps"]),
    }
    if "hit_rate" in row:
        cells |= {
            "hits": f"{row['hit_rate']:.1%}",
            "CPU reads": f"{row['cpu_bytes']:.0%}",
            "swaps/step": f"{row['swaps_per_step']:.2f}",
        }
    if "best_fixed" in row:
        cells["best fixed"] = f"{row['best_fixed']:.1%}"
    if "decode_tok_s" in row:
        cells |= {
            "decode tok/s": f"{row['decode_tok_s']:.1f}",
            "CPU MB/step": f"{row['bytes_per_step'] / 1e6:.0f}",
            "CPU busy": f"{row['cpu_busy']:.0%}",
        }
        for name, value in row.items():
            if name.startswith(TTFT):
                cells[f"TTFT {name.removeprefix(TTFT)}"] = f"{value:.1f} ms"
    return cells


def draw(results: Results, path: Path) -> None:
    """Hits against swaps by policy, a panel for each size; where an engine was timed, decode by
    size, and the time to the first token by the prompt's length. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = results["rows"]
    simulated = [row for row in rows if row["kind"] == "simulated"]
    measured = [row for row in rows if row["kind"] == "measured"]
    sizes = list(dict.fromkeys(row["slots"] for row in simulated))
    count = len(sizes) + 2 * bool(measured)
    figure, panels = plt.subplots(
        1, count, figsize=(3.4 * count, 3.4), layout="constrained", squeeze=False
    )
    for axes, size in zip(panels[0], sizes, strict=False):
        _hits(axes, [row for row in simulated if row["slots"] == size])
    if measured:
        _decode(panels[0][-2], measured)
        _first_token(panels[0][-1], measured)
    for axes in panels[0]:
        axes.grid(True, alpha=0.2)
    title = "{model} {format}, {experts} experts a layer"
    figure.suptitle(title.format_map(results), fontsize=10)
    figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def _hits(axes: Any, rows: list[Row]) -> None:
    for name in dict.fromkeys(row["policy"] for row in rows):
        policy_rows = [row for row in rows if row["policy"] == name]
        at, rates = [row["swaps"] for row in policy_rows], [row["hit_rate"] for row in policy_rows]
        line = "--" if name.endswith("-fixed") else "-"
        axes.plot(at, rates, line, marker="o", ms=3, label=name)
    axes.axhline(rows[0]["best_fixed"], color="black", lw=1, ls="-.", label="best fixed")
    axes.axhline(rows[0]["share"], color="0.6", lw=1, ls=":", label="any experts")
    axes.set(xlabel="swaps a layer and step", ylabel="hit rate")
    axes.set_title(f"{rows[0]['slots']} slots ({rows[0]['share']:.0%})", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=6)


def _decode(axes: Any, rows: list[Row]) -> None:
    without = [row for row in rows if not row["slots"]]
    for key in dict.fromkeys((r["policy"], r["swaps"]) for r in rows if r["slots"]):
        policy_rows = without + [r for r in rows if r["slots"] and (r["policy"], r["swaps"]) == key]
        points = (
            [100 * row["share"] for row in policy_rows],
            [row["decode_tok_s"] for row in policy_rows],
        )
        axes.plot(*points, marker="o", ms=3, label=f"{key[0]}, {key[1]} swaps")
    axes.set(xlabel="% of the experts in slots", ylabel="decode tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=6)


def _first_token(axes: Any, rows: list[Row]) -> None:
    for row in rows:
        points = {int(k.removeprefix(TTFT)): v for k, v in row.items() if k.startswith(TTFT)}
        label = f"{row['share']:.0%}, {row['swaps']} swaps" if row["slots"] else "no cache"
        axes.plot(list(points), list(points.values()), marker="o", ms=3, label=label)
    axes.set(xlabel="tokens of the prompt", ylabel="ms to the first token")
    axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=6)
