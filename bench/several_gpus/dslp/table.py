"""Streamed prompts on several GPUs as tables, beside what the paper (OSDI 2026) says of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row
from bench.papers import osdi_text as told

from ..unsteady import unsteady
from .depth import Depth
from .plot import figure_of
from .prompts import EXCHANGES

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]
LEGEND = (
    "x: as fast as on the first GPU, so many times; GB/s: of experts over all links; sent: from one"
    " GPU to another"
)
STANDARD = EXCHANGES["all_to_all"]
"""What the names of ways with it have."""
_NEAR = 0.1
"""How far a length may be from the paper's, to stand beside it."""


def line(row: Row) -> str:
    """A row for the terminal."""
    text = f"{row['seconds']:.3f} s, {row['tok_s']:.0f} tokens/s"
    if "x_first" in row:
        text += f", {row['x_first']:.2f} x"
    if "link_gbps" in row:
        text += f", {row['link_gbps']:.1f} GB/s of experts"
    return text


def tables(results: Results) -> list[str | Table]:
    """What was timed; the prompts; the paper's figures beside ours."""
    r = results
    head = (
        "{model}, {layers} layers, {format}, cache in {kv_dtype}; {gpu} as {device},"
        " {threads} threads"
    )
    found: list[str | Table] = [head.format_map(r | {"gpu": r["gpu"] or "no GPU"}), prompts(r)]
    found.append(LEGEND)
    found += unsteady(r["rows"], lambda row: f"{row['way']}, {row['tokens']} tokens")
    found += [note] if (note := depth_of(r).said) else []
    found += [each for each in (_speed(r), _layer(r), _volumes(r)) if each is not None]
    return found


def depth_of(results: Results) -> Depth:
    """Layers, of the rows that are there."""
    depth = results["depth"]
    moe = {int(layers): count for layers, count in depth["moe"].items()}
    return Depth(moe, depth["whole"], depth["whole_moe"])


def deepest(results: Results) -> list[Row]:
    """Rows with as many layers as were timed."""
    most = depth_of(results).most
    return [row for row in results["rows"] if row["layers"] == most]


def prompts(results: Results) -> Table:
    """A line for each prompt and way. x: how many times as fast as on the first GPU; GB/s: of
    experts over all links; sent: from one GPU to another."""
    from rich.table import Table

    depth = depth_of(results)
    whole, thin = depth.most < depth.whole, len(depth.moe) > 1
    made = Table(title="prompts", title_justify="left", box=None, pad_edge=False)
    names = ["tokens", "way", *(["layers"] if thin else []), "s", "tokens/s", "x", "GB/s"]
    names += ["sent GB", *([f"s, {depth.whole} layers"] if whole else [])]
    for name in names:
        justify: Any = "left" if name == "way" else "right"
        made.add_column(name, justify=justify, no_wrap=name == "way")
    for row in results["rows"]:
        cells = [str(row["tokens"]), row["way"], *([str(row["layers"])] if thin else [])]
        cells += [f"{row['seconds']:.3f}", f"{row['tok_s']:.0f}", _number(row.get("x_first"), 2)]
        cells.append(_number(row.get("link_gbps"), 1))
        between = row.get("between_bytes") or None
        cells.append(_number(between and between / 1e9, 2))
        if whole:
            deep = row["layers"] == depth.most
            taken = depth.seconds(results["rows"], row["way"], row["tokens"]) if deep else None
            cells.append(_number(taken, 2))
        made.add_row(*cells)
    return made


def _speed(results: Results) -> Table | None:
    """Figures 13 and 14: the most tokens a second, and the longest prompt within 30 s, by GPUs."""
    rows = [row for row in deepest(results) if row["way"] != "CPU"]
    if not rows:
        return None
    made = _paper_table("Figures 13 and 14: prompts")
    depth = depth_of(results)
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        times = {row["tokens"]: depth.seconds(results["rows"], way, row["tokens"]) for row in own}
        taken = {tokens: seconds for tokens, seconds in times.items() if seconds}
        gpus = own[0]["gpus"]
        if taken:
            most = max(tokens / seconds for tokens, seconds in taken.items())
            says = (
                f"up to {told.SLP_MOST_TOK_S:.0f}"
                if gpus == 1
                else f"over {told.DSLP_MOST_TOK_S:.0f}"
            )
            made.add_row(f"{way}: most tokens/s", says if gpus < 3 else "", f"{most:.0f}")
            within = [tokens for tokens, s in taken.items() if s <= told.TTFT_LIMIT_S]
            limit = f"{told.WITHIN_LIMIT[gpus]} tokens" if gpus in told.WITHIN_LIMIT else ""
            ours = f"{max(within)} tokens, {taken[max(within)]:.1f} s" if within else "none timed"
            made.add_row(f"{way}: first token within {told.TTFT_LIMIT_S:.0f} s", limit, ours)
        for row in own:
            if "x_first" in row and 18000 <= row["tokens"] <= 33000:
                says = str(told.DSLP_OVER_SLP) if gpus == 2 and STANDARD not in way else ""
                made.add_row(
                    f"{way} over one, {row['tokens']} tokens, x", says, f"{row['x_first']}"
                )
    return made


def _layer(results: Results) -> Table | None:
    """Figure 3: a layer's share of a prompt of about 20,000 tokens."""
    near = [
        row
        for row in deepest(results)
        if abs(row["tokens"] / told.LAYER_TOKENS - 1) <= _NEAR and row["way"] != "CPU"
    ]
    if not near or near[0]["gpus"] != 1:
        return None
    one = near[0]["seconds"]
    title = f"Figure 3: a layer's time, {near[0]['tokens']} tokens; the paper's without peer access"
    made = _paper_table(title)
    for row in near:
        ms = 1e3 * row["seconds"] / row["layers"]
        says = {1: "1", 2: f"{told.EP_LAYER_TIME * told.SMALL_EP_OVER_EP:.2f}"}.get(row["gpus"], "")
        if STANDARD in row["way"]:
            says = str(told.EP_LAYER_TIME)
        made.add_row(row["way"], says, f"{row['seconds'] / one:.2f}, {ms:.2f} ms")
    for row in near:
        small = [each for each in near if each["way"] == row["way"].replace(STANDARD, "")]
        if STANDARD in row["way"] and small:
            over = f"{small[0]['seconds'] / row['seconds']:.2f}"
            made.add_row(f"{small[0]['way']} over {row['way']}", str(told.SMALL_EP_OVER_EP), over)
    return made


def _volumes(results: Results) -> Table | None:
    """Figure 6: bytes that a rank sends in a layer."""
    if not (found := results.get("volumes")):
        return None
    standard = next(each["bytes"] for each in found if each["form"] == "all_to_all")
    first = found[0]
    title = f"Figure 6: MB that a GPU of {first['ranks']} sends for a layer's experts"
    made = _paper_table(f"{title}, {first['tokens']} tokens")
    for each in found:
        ops = ", ".join(f"{op} {count / 1e6:.0f}" for op, count in each["by_op"].items())
        share = f"{each['bytes'] / standard:.2f}"
        says = "1" if each["form"] == "all_to_all" else f"about {told.SMALL_EP_BYTES}"
        made.add_row(each["form"], says, f"{share}: {each['bytes'] / 1e6:.0f} MB ({ops})")
    return made


def _paper_table(title: str) -> Table:
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "the paper", "here"):
        made.add_column(name)
    return made


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw(results: Results, path: Path) -> None:
    """Writes the plot. Needs matplotlib."""
    figure_of(results, deepest(results), _whole(results), path)


def _whole(results: Results) -> dict[str, list[tuple[int, float]]]:
    """By way, tokens of a prompt and its seconds with all layers."""
    depth, rows = depth_of(results), results["rows"]
    found: dict[str, list[tuple[int, float]]] = {}
    for row in deepest(results):
        if (seconds := depth.seconds(rows, row["way"], row["tokens"])) is not None:
            found.setdefault(row["way"], []).append((row["tokens"], seconds))
    return found
