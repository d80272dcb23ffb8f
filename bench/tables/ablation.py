"""Rows of an ablation as text and as a plot."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""``op`` ("ablation"), ``model``, ``format``, ``layers``, ``device``, ``batch``, ``context``,
``stage``; ``tok_s``, ``us_per_step``, and how many times faster it is than the first stage
(``x_first``) and the one before (``x_before``), or ``why`` there are none; on a GPU the experts of
a token that are ``deferred``."""
OP = "ablation"

NOTE = (
    "Tokens a second of decode, over all sequences; each stage has what the one before has and one"
    " idea more. Medians over turns: the stages take turns, over one copy of the weights; × is the"
    " median of the ratios of a round. Weights are random, the shapes real."
)


def title(row: Row) -> str:
    """The case and the stage."""
    return f"{case_title(row)}: {row['stage']}"


def case_title(row: Row) -> str:
    """The case, of which the stages are timed."""
    name = f"{row['model']} x{row['layers']} {row['format']}"
    return f"{name}, {row['device']}, batch {row['batch']}, context {row['context']}"


def line(row: Row) -> str:
    """A row for the terminal."""
    if "why" in row:
        return f"{title(row)}: FAILED: {row['why']}"
    return f"{title(row)}: {row['tok_s']:.1f} tok/s, {row['x_before']:.2f} x the one before"


def table(rows: list[Row]) -> list[str]:
    """Lines of Markdown."""
    lines = []
    for case in dict.fromkeys(map(case_title, rows)):
        some = [row for row in rows if case_title(row) == case]
        lines += [f"### {case}", "", "| stage | tok/s | us/step | × before | × first |"]
        lines.append("| --- | ---: | ---: | ---: | ---: |")
        for row in some:
            if "why" not in row:
                ratios = f"{row['x_before']:.2f} | {row['x_first']:.2f}"
                figures = f"**{row['tok_s']:.1f}** | {row['us_per_step']:.0f} | {ratios}"
                deferred = f" ({row['deferred']} experts)" if row.get("deferred") else ""
                lines.append(f"| {row['stage']}{deferred} | {figures} |")
        for row in some:
            if "why" in row:
                lines += ["", f"Not timed: {row['stage']}: {row['why']}"]
        lines.append("")
    return lines[:-1]


def bars(plt: Any, rows: list[Row]) -> Any:
    """A panel a case, a bar a stage, as the SOSP'25 paper's Figure 14."""
    cases = list(dict.fromkeys(map(case_title, rows)))
    most = max(sum(case_title(row) == case for row in rows) for case in cases)
    size = 8.0, len(cases) * (0.9 + 0.42 * most)
    figure, panels = plt.subplots(len(cases), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, case in zip(panels[:, 0], cases, strict=True):
        some = [row for row in rows if case_title(row) == case]
        at = range(len(some))
        axes.barh(at, [row["tok_s"] for row in some], height=0.7)
        for y, row in zip(at, some, strict=True):
            text = f" {row['tok_s']:.1f}"
            if y:
                text += f"  (× {row['x_before']:.2f})"
            axes.text(row["tok_s"], y, text, va="center", fontsize=8)
        axes.set_yticks(at, [row["stage"] for row in some], fontsize=8)
        axes.set_ylim(len(some) - 0.5, -0.5)
        axes.set_xlim(0, 1.25 * max(row["tok_s"] for row in some))
        axes.set_title(case, fontsize=9)
        axes.set_xlabel("tokens/s of decode", fontsize=8)
    return figure
