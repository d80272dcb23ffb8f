"""A run as text: one line a row while it goes on, and the Markdown page beside the JSON."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from bench.tables import ablation, e2e

from .timing.rows import Row, peers_of, title

Results = dict[str, Any]
OWN = {"e2e": e2e, "ablation": ablation}
"""Modules that write an op's rows in place of this file, by the op's first word."""

NOTE = (
    "Medians; inputs, or weights, rotate over more than the last cache holds. GB/s counts "
    "each input and output once, of experts those that a call's routing touches. The roof is "
    "the larger of the bytes at the measured read rate and the operations at the measured "
    "rate of the instructions that multiply; its share says how near the time is. × is how "
    "many times faster than that peer, the median of ratios between neighbouring turns. On a "
    "GPU a turn is the replay of a CUDA graph of many calls (eager calls where marked \\*). "
    "On a CPU one engine runs at a time: peers are stopped while another has its turn, and "
    "each is timed on the number of threads that it is fastest on."
)


def line(row: Row) -> str:
    """A row for the terminal."""
    head = f"{row['op']:9s} {title(row)}: "
    if "why" in row:
        return head + f"FAILED: {row['why']}"
    ratios = "".join(f", {row[f'x_{p}']:.2f} x {p}{_eager(row, p)}" for p in peers_of(row))
    missing = "".join(
        f", no {key.removeprefix('why_')} ({row[key]})" for key in row if key.startswith("why_")
    )
    rounded = ".1f" if row["tflops"] >= 10 else ".3g"
    return (
        f"{head}{row['us_median']:.1f} us{_eager(row)}, {row['gbps']:.0f} GB/s,"
        f" {row['tflops']:{rounded}} TFLOP/s,"
        f" {row['roof_share']:.0%} of the {row['bound']} roof{ratios}{missing}"
    )


def _captured(row: Row, peer: str = "") -> bool:
    return bool(row.get(f"captured_{peer}" if peer else "captured", True))


def _eager(row: Row, peer: str = "") -> str:
    return "" if _captured(row, peer) else " (NOT CAPTURED)"


def markdown(results: Results, plots: list[str]) -> str:
    """The page; ``plots`` are file names beside it."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quick = " Quick run: few cases." if results["quick"] else ""
    missing = f" Rows are missing: {why}." if (why := results["why"]) else ""
    lines = [
        f"# {results['headline']}",
        "",
        f"{machine['date']}.{quick}{missing} {versions}. {machine['about']}",
        "",
        f"`{results['command']}`",
        "",
        *(f"{note}\n" for note in results["notes"]),
        "\n\n".join(
            dict.fromkeys(_own(row).NOTE if _own(row) else NOTE for row in results["rows"])
        ),
        "",
    ]
    ops = list(dict.fromkeys(row["op"] for row in results["rows"]))
    by_op = sorted(results["rows"], key=lambda row: ops.index(row["op"]))
    for op, rows in groupby(by_op, key=lambda row: row["op"]):
        some = list(rows)
        writer = _own(some[0])
        shown = writer.table(some) if writer else _table(some)
        lines += [f"## {op}", "", *shown, ""]
    lines += [f"![{plot}]({plot})\n" for plot in plots]
    return "\n".join(lines).rstrip() + "\n"


def _own(row: Row) -> Any:
    return OWN.get(row["op"].split()[0])


def _table(rows: list[Row]) -> list[str]:
    timed = [row for row in rows if "why" not in row]
    names = list(dict.fromkeys(peer for row in timed for peer in peers_of(row)))
    heads = ["case", "us", "p10-p90", "MB", "GFLOP", "GB/s", "TFLOP/s", "roof", "share"]
    heads += [f"× {name}" for name in names]
    found = [
        [
            title(row),
            f"{row['us_median']:.1f}" + ("" if _captured(row) else "\\*"),
            f"{row['us_p10']:.1f}-{row['us_p90']:.1f}",
            f"{row['nbytes'] / 1e6:.4g}",
            f"{row['flops'] / 1e9:.4g}" if row["flops"] else "",
            f"{row['gbps']:.0f}",
            f"{row['tflops']:.3g}" if row["flops"] else "",
            row["bound"],
            f"{row['roof_share']:.0%}",
            *(_ratio(row, name) for name in names),
        ]
        for row in timed
    ]
    rule = ["---", *("---:" for _ in heads[1:])]
    cells = [heads, rule, *found] if found else []
    lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
    for row in rows:
        if "why" in row:
            lines += ["", f"Not timed: {title(row)}: {row['why']}"]
    for (peer, why), cases in _missing(rows).items():
        shown = cases[0] if len(cases) == 1 else f"{len(cases)} cases, the first {cases[0]}"
        lines += ["", f"No {peer} for {shown}: {why}"]
    return lines


def _ratio(row: Row, peer: str) -> str:
    if f"x_{peer}" not in row:
        return ""
    return f"{row[f'x_{peer}']:.2f}" + ("" if _captured(row, peer) else "\\*")


def _missing(rows: list[Row]) -> dict[tuple[str, str], list[str]]:
    """Cases without a peer, by peer and reason."""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for key in row:
            if key.startswith("why_"):
                peer = key.removeprefix("why_")
                missing.setdefault((peer, row[key]), []).append(title(row))
    return missing
