"""The page that shows predictions beside committed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from .compared import Compared
from .moved import TARGET, median_error
from .ranking import Ranked, ranked, ten
from .rows import APART, UNSTEADY, committed
from .validate import TARGETS, UNTIMED, compare, compare_moved, errors


def page(found: Sequence[Compared], elsewhere: Mapping[tuple[str, str], Sequence[Compared]]) -> str:
    """The comparison as Markdown.

    Args:
        elsewhere: of ``compare_moved``.
    """
    text = [
        "# Predicted beside measured",
        "",
        "`python -m bench.papers validate`: every committed run of a whole model of ours, and what"
        " `pykernels plan`'s simulator says of it from the shape, the options and the"
        " machine's file"
        " in [bench/machines](../../machines). Errors are of the time. Rates of the"
        " 16-core machines"
        " are those of tables of kernels, but for what `calibrated_on` in their files"
        " names. What plain loops read of main memory in a run is an input, and a batch's routing:"
        " as uneven as makes the bytes that the run counted; prompts have the law of these"
        " batches.",
        "",
        "Rows in brackets do not count: a constant was taken from them (*calibrated on*); a newer"
        " row has the same options on the same hardware, when the program was faster (*older*);"
        f" their 90th percentile is over {UNSTEADY} times the 10th, or the slowest of their two or"
        f" three rounds, or of the runs of that day that timed the same, took over {APART} times as"
        " long as the fastest (*unsteady*); nobody counted which experts batches of their model"
        f" read (*routing not counted*); they are prompts of {UNTIMED[1]} tokens or more in FP8 on"
        " a GPU, whose kernels are in no table of ours (E4M3 beside bf16 activations, of many rows)"
        " and count as bf16's (*kernels never timed*).",
        "",
        "A prompt is read in as many steps as the run took. Steps that expand latents (DeepSeek's)"
        " are launched node by node on a GPU, at the rate of a decode step of another model without"
        " its graph.",
        "",
        "These rows were compared several times while the simulator was made, and its"
        " constants and the rules of what counts changed after some of these comparisons:"
        " the errors are those of a fit, not of a forecast.",
        "",
    ]
    for kind, (middle, worst) in TARGETS.items():
        have = errors(found, kind)
        count = sum(each.row.kind == kind and each.counts for each in found)
        text.append(
            f"**{kind}**: {count} rows, median error {have[0]:.1%} (target {middle:.0%}),"
            f" worst {have[1]:.1%} (target {worst:.0%})."
        )
        among = sum(each.row.kind == kind and each.counts and each.row.several for each in found)
        own = errors(found, kind, several=True)
        text.append(f"Of several GPUs {among}: median {own[0]:.1%}, worst {own[1]:.1%}.")
    right, pairs = ranked(found)
    text.append("")
    text.append(
        f"**Ranking**: of {pairs} pairs of rows that differ in place or options alone, by 5 % at"
        f" least, {right} are predicted in the measured order."
    )
    text += _days(found) + _choices(list(ten(found))) + _moves(elsewhere)
    for kind, unit in (("decode", "us a step"), ("prompt", "tok/s")):
        text += ["", f"## {kind}, {unit}", ""]
        text += [
            "| machine | model | where | batch | context | measured | predicted | error |"
            " bound by |"
        ]
        text += ["|---|---|---|---:|---:|---:|---:|---:|---|"]
        for each in found:
            row = each.row
            if row.kind != kind:
                continue
            error = f"{each.error:+.1%}"
            text.append(
                f"| {row.machine} | {row.arch}, {row.layers} layers, {row.fmt} | {row.place} |"
                f" {row.batch} | {row.context} | {row.measured:.0f} | {each.predicted:.0f} |"
                f" {error if each.counts else f'[{error}, {each.why_not}]'} | {each.bound}"
                f"{f', zipf {each.routing.zipf}' if each.routing.zipf else ''} |"
            )
    return "\n".join(text) + "\n"


def _days(found: Sequence[Compared]) -> list[str]:
    """Errors by day: each time another machine of the kind was lent."""
    every: dict[tuple[str, str], list[float]] = {}
    for each in found:
        if each.row.kind == "decode" and each.counts:
            every.setdefault((each.row.machine, each.row.date), []).append(each.error)
    text = [
        "",
        "Decode by day, since machines of one kind differ: below 0, this one was slower than its"
        " file says.",
        "",
        "| machine | day | rows | median | least | most |",
        "|---|---|---:|---:|---:|---:|",
    ]
    return text + [
        f"| {machine} | {day} | {len(own)}"
        f" | {median(own):+.1%} | {min(own):+.1%} | {max(own):+.1%} |"
        for (machine, day), own in sorted(every.items())
    ]


def _choices(found: Sequence[Ranked]) -> list[str]:
    """The lines of ``TEN``."""
    right = sum(each.right for each in found)
    text = [
        "",
        f"**Ten choices** (Qwen3-30B's shapes, 24 layers, q4_k; medians of all their runs): {right}"
        f" of {len(found)} are predicted in the measured order (target: all).",
        "",
        "| machine | of | how many times as fast | than | measured | predicted |",
        "|---|---|---|---|---:|---:|",
    ]
    for each in found:
        at, size = each.choice, f"batch {each.choice.batch}, {each.choice.size} tokens"
        text.append(
            f"| {at.machine} | {at.kind}, {size} | {at.other} | {at.one} |"
            f" {each.measured:.2f} | {each.predicted:.2f}{'' if each.right else ', wrong'} |"
        )
    return text


def _moves(elsewhere: Mapping[tuple[str, str], Sequence[Compared]]) -> list[str]:
    """The lines of moved machines."""
    every = [each for rows in elsewhere.values() for each in rows]
    text = [
        "",
        f"**Moved machine**: {len(every)} rows, median error {median_error(every):.1%} (target"
        f" {TARGET:.0%}). Constants of the one machine's file, and of the other its roofs alone:"
        " cores, what they read, links and GPUs as published, and where instructions differ the"
        " kernels of their class. Rows count of which only the other's own constants were taken.",
        "",
        "| calibrated on | moved to | decode rows | median | worst | prompt rows | median |"
        " worst |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (known, there), rows in elsewhere.items():
        cells = [known, there]
        for kind in TARGETS:
            own = [each for each in rows if each.row.kind == kind]
            worst = max((abs(each.error) for each in own), default=0.0)
            cells += [str(len(own)), f"{median_error(own):.1%}", f"{worst:.1%}"]
        text.append("| " + " | ".join(cells) + " |")
    return text


def validate(out: Path) -> tuple[list[Compared], str]:
    """Compares all, and writes the page; both."""
    found = compare(list(committed()))
    text = page(found, compare_moved(found))
    out.mkdir(parents=True, exist_ok=True)
    (out / "validate.md").write_text(text)
    return found, text
