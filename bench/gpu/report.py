"""A run as text: one line a row while it goes on, and a Markdown page beside the JSON."""

from __future__ import annotations

from itertools import groupby
from typing import Any

Row = dict[str, Any]
Results = dict[str, Any]

_KNOWN = {
    "op", "name", "us_median", "us_p10", "us_p90", "nbytes", "flops", "gbps", "tflops",
    "read_roof_gbps", "copy_roof_gbps", "matmul_roof_tflops", "read_share", "copy_share",
    "matmul_share", "bound", "roof_us", "roof_share", "captured", "calls", "why",
}  # fmt: skip
_PEER = ("us_", "x_", "captured_", "why_")

NOTE = (
    "Medians of replays of a CUDA graph of many calls (eager calls where marked \\*). Inputs rotate"
    " over more than the L2 holds. GB/s counts each input and output once. The roof is the larger"
    " of the bytes at the measured read rate and the operations at the measured bf16 matmul rate"
    " (FP8: twice that); its share says how near the time is. × is how many times faster than that"
    " peer, the median of ratios between neighbouring replays."
)


def params(row: Row) -> dict[str, Any]:
    """The sizes and formats among a row's columns."""
    return {
        key: value for key, value in row.items() if key not in _KNOWN and not key.startswith(_PEER)
    }


def peers(row: Row) -> list[str]:
    """Peers that were timed beside a row."""
    return [key.removeprefix("x_") for key in row if key.startswith("x_")]


def title(row: Row) -> str:
    sizes = " ".join(f"{key}={value}" for key, value in params(row).items())
    return f"{row['name']} {sizes}".strip()


def line(row: Row) -> str:
    """A row for the terminal."""
    head = f"{row['op']:9s} {title(row)}: "
    if "why" in row:
        return head + f"FAILED: {row['why']}"
    ratios = "".join(
        f", {row[f'x_{peer}']:.2f} x {peer}{_eager(row[f'captured_{peer}'])}" for peer in peers(row)
    )
    missing = "".join(
        f", no {key.removeprefix('why_')} ({row[key]})" for key in row if key.startswith("why_")
    )
    return (
        f"{head}{row['us_median']:.1f} us{_eager(row['captured'])}, {row['gbps']:.0f} GB/s,"
        f" {row['tflops']:.1f} TFLOP/s,"
        f" {row['roof_share']:.0%} of the {row['bound']} roof{ratios}{missing}"
    )


def _eager(captured: bool) -> str:
    return "" if captured else " (NOT CAPTURED)"


def ratio(row: Row, peer: str) -> str:
    """How many times faster than the peer, for Markdown; marked where it was not captured."""
    return f"{row[f'x_{peer}']:.2f}" + ("" if row[f"captured_{peer}"] else "\\*")


def markdown(results: Results, plot: str | None) -> str:
    """The page; ``plot`` is a file name beside it."""
    machine, roofs = results["machine"], results["roofs"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quick = " Quick run: few cases." if results["quick"] else ""
    ended = f" Cases are missing: {why}." if (why := results.get("ended")) else ""
    lines = [
        f"# {machine['gpu']}",
        "",
        f"{machine['date']}.{quick}{ended} {versions}. Compute capability {machine['capability']},"
        f" {machine['multiprocessors']} multiprocessors, L2 {machine['l2_bytes'] >> 20} MiB.",
        "",
        f"Roofs in this run: read {roofs['read_gbps']:.0f} GB/s, copy {roofs['copy_gbps']:.0f} GB/s"
        f" (both directions counted), 8192^3 bf16 matmul {roofs['matmul_tflops']:.0f} TFLOP/s.",
        "",
        NOTE,
        "",
    ]
    ops = list(dict.fromkeys(row["op"] for row in results["rows"]))
    by_op = sorted(results["rows"], key=lambda row: ops.index(row["op"]))
    for op, rows in groupby(by_op, key=lambda row: row["op"]):
        lines += [f"## {op}", "", *_table(list(rows)), ""]
    if plot:
        lines.append(f"![{plot}]({plot})")
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[Row]) -> list[str]:
    timed = [row for row in rows if "why" not in row]
    names = list(dict.fromkeys(peer for row in timed for peer in peers(row)))
    heads = [
        "case",
        "us",
        "p10-p90",
        "MB",
        "GFLOP",
        "GB/s",
        "TFLOP/s",
        "roof",
        "share",
        *(f"× {n}" for n in names),
    ]
    found = [
        [
            title(row),
            f"{row['us_median']:.1f}" + ("" if row["captured"] else "\\*"),
            f"{row['us_p10']:.1f}-{row['us_p90']:.1f}",
            f"{row['nbytes'] / 1e6:.4g}",
            f"{row['flops'] / 1e9:.4g}" if row["flops"] else "",
            f"{row['gbps']:.0f}",
            f"{row['tflops']:.2f}" if row["flops"] else "",
            row["bound"],
            f"{row['roof_share']:.0%}",
            *(ratio(row, name) if f"x_{name}" in row else "" for name in names),
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


def _missing(rows: list[Row]) -> dict[tuple[str, str], list[str]]:
    """Cases without a peer, by peer and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for key in row:
            if key.startswith("why_"):
                peer = key.removeprefix("why_")
                found.setdefault((peer, row[key]), []).append(title(row))
    return found
