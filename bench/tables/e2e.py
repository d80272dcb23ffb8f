"""Rows of whole models as text: one line a row for the terminal, Markdown tables for the page."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""``op`` ("e2e prefill", "e2e decode"), ``model``, ``format``, ``layers``, ``place`` (of
``places``), ``tokens``, ``batch``, ``context``; ``tok_s``, and of each peer ``tok_s_NAME``,
``x_NAME`` and ``settings_NAME``, or ``why_NAME``. A row of a decode has the step's figures too, one
of a model that could not be timed ``why`` and none."""

NOTE = (
    "Tokens a second, over all sequences; medians over turns. Engines take turns, one at a time:"
    " ours stays loaded and its workers sleep, each peer is a process that loads the model and"
    " warms up. × is how many times faster than that peer ours is, the median of the ratios of a"
    " round. llama.cpp takes prompts as its program does unless told otherwise (default), and with"
    " the fastest of -ub 512, 2048 and 4096 (best), the ratio to quote: on a CPU tried with flash"
    " attention and without, beside a GPU with it, and where experts are on the CPU with weights"
    " in pinned memory too (-lm none). It decodes on as many threads as are fastest."
    " With -ncmoe 99 all its experts are on the CPU, as ours; with -ngl 99 as many layers'"
    " experts are on the GPU as fit beside ours. Weights are random, the shapes real; llama.cpp has"
    " every matrix in the same format,"
    " transformers everything in bfloat16. Ours draws every token at temperature 1; llama.cpp's"
    " programs draw none, transformers takes the likeliest. GB/s counts a step's weights, of the"
    " experts those that its tokens took, and the keys and values; the roof is what as many"
    " threads read in a plain loop in the same run. us/layer is what a step takes beyond its bytes"
    " at that rate, over the layers; us outside is what it takes beyond the kernels' jobs."
    " Beside a GPU, bytes and roof are those of the CPU, which is busy while it does not wait;"
    " the bound is what it could decode at that rate."
)


def is_whole(row: Row) -> bool:
    """Whether a row is of a whole model."""
    return str(row["op"]).startswith("e2e")


def title(row: Row) -> str:
    """The title of a row: its case, and where ours ran."""
    return ", ".join(filter(None, (case_title(row), row.get("place", ""))))


def case_title(row: Row) -> str:
    """The title of the timed case."""
    name = f"{row['model']} x{row['layers']} {row['format']}"
    if row["op"] == "e2e prefill":
        return f"{name}, prompt {row['tokens']}"
    return f"{name}, batch {row['batch']}, context {row['context']}"


def peers_of(row: Row) -> list[str]:
    """The peers that were timed beside it."""
    return [key.removeprefix("x_") for key in row if key.startswith("x_")]


def line(row: Row) -> str:
    """A row for the terminal."""
    head = f"{row['op'].removeprefix('e2e '):8s} {title(row)}: "
    if "why" in row:
        return head + f"FAILED: {row['why']}"
    text = f"{head}{row['tok_s']:.1f} tok/s"
    if row.get("gbps"):
        text += f", {row['gbps']:.1f} GB/s, {row['roof_share']:.0%} of the read roof"
    for peer in peers_of(row):
        text += f", {row[f'x_{peer}']:.2f} x {peer} ({row[f'tok_s_{peer}']:.1f})"
    for peer, why in missing(row).items():
        text += f", no {peer} ({why})"
    return text


def missing(row: Row) -> dict[str, str]:
    """Peers that were not timed beside it, and why."""
    return {k.removeprefix("why_"): row[k] for k in row if k.startswith("why_")}


def bound(row: Row) -> str:
    """Tokens a second at which the CPU would read its bytes at the roof."""
    nbytes = row["bytes_per_step"]
    return f"{row['batch'] * 1e9 * row['roof_gbps'] / nbytes:.0f}" if nbytes else ""


def table(rows: list[Row]) -> list[str]:
    """Lines of Markdown for the rows of one op."""
    timed = [row for row in rows if "why" not in row]
    peers = list(dict.fromkeys(peer for row in timed for peer in peers_of(row)))
    decode = rows[0]["op"] == "e2e decode"
    hybrid = decode and any(row["wait_us_per_layer"] for row in timed)
    heads = ["case", "tok/s", *(head for peer in peers for head in (peer, f"× {peer}"))]
    if decode:
        heads += ["us/step", "MB/step", "GB/s", "roof", "share", "us/layer", "us outside"]
        if hybrid:
            heads += ["bound tok/s", "CPU busy", "us waiting/layer", "deferred"]
    lines: list[list[str]] = [heads, ["---", *("---:" for _ in heads[1:])]] if timed else []
    for row in timed:
        cells = [title(row), f"**{row['tok_s']:.1f}**"]
        for peer in peers:
            here = f"x_{peer}" in row
            cells += (
                [f"{row[f'tok_s_{peer}']:.1f}", f"{row[f'x_{peer}']:.2f}"] if here else ["", ""]
            )
        if decode:
            cells += [
                f"{row['us_per_step']:.0f}",
                f"{row['bytes_per_step'] / 1e6:.0f}",
                f"{row['gbps']:.1f}",
                f"{row['roof_gbps']:.1f}",
                f"{row['roof_share']:.0%}",
                f"{row['us_per_layer']:.0f}",
                f"{row['python_us_per_step']:.0f}",
            ]
            if hybrid:
                waits = f"{row['wait_us_per_layer']:.1f}", str(row["deferred"])
                cells += [bound(row), f"{row['cpu_busy']:.0%}", *waits]
        lines.append(cells)
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    for row in rows:
        if "why" in row:
            text += ["", f"Not timed: {title(row)}: {row['why']}"]
    for peer in peers:
        named = {row.get(f"settings_{peer}"): None for row in timed}
        if words := ", ".join(f"`{words}`" for words in named if words):
            text += ["", f"{peer}: {words}"]
    whys = {(peer, why): None for row in rows for peer, why in missing(row).items()}
    for peer, why in whys:
        text += ["", f"No {peer}: {why}"]
    return text
