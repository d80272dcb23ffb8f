"""A run as a table: on the terminal (rich), and as Markdown beside the JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Results = dict[str, Any]
RATIOS = ("kt-kernel", "llama.cpp", "torch bf16", "torch fp32", "numpy fp32")
HEADINGS = (
    "format", "tokens", "engine", "ms", "GB/s", "read roof", "TFLOP/s", "compute roof",
    *(f"× {peer}" for peer in RATIOS),
)  # fmt: skip

NOTE = (
    "Medians, weights out of cache; GB/s counts the distinct experts of a call. Shares are of the"
    " plain read loop and of a register-only loop of the products that the row's engine multiplies"
    " with (amx: tiles, avx512: dot products, or float32 multiply-adds where these are faster;"
    " /int8: of int8, else of bf16, which integer weights pass where their inputs are multiplied as"
    " digits of 8 bits; peers in bf16: the fastest of these), both sampled between the turns. × is"
    " how many times faster than that peer, the median of ratios within a round. One engine runs at"
    " a time: peers are stopped while another has its turn. A peer is tried on several numbers of"
    " threads and timed on the fastest, which is named where it is not ours. One that is asked for"
    " one token only (NumPy) holds experts for two calls: it reads as many a call."
)


def table_rows(results: Results) -> list[list[str]]:
    """Cells of ``HEADINGS`` of each row with figures, grouped by case."""
    threads = results["settings"]["threads"]
    return [_cells(row, results["shape"], threads) for row in _timed(results)]


def _timed(results: Results) -> list[dict[str, Any]]:
    return [row for row in results["table"] if "why" not in row]


def _cells(row: dict[str, Any], shape: dict[str, int], threads: int) -> list[str]:
    count = row["threads"]
    other = "" if count == threads else f" ({count} thread{'s' if count > 1 else ''})"
    per_expert = row["tokens"] * shape["topk"] / shape["E"]
    tokens = f"{row['tokens']}" if per_expert < 5 else f"{row['tokens']} ({per_expert:.0f}/expert)"
    return [
        row["format"],
        tokens,
        f"{row['engine']} {row['backend']}{other}",
        f"{row['us'] / 1e3:.2f}",
        f"{row['gbps']:.1f}",
        f"{row['read_share']:.0%}",
        f"{row['tflops']:.3f}",
        "" if row["compute_share"] is None else f"{row['compute_share']:.0%}",
        *(ratio_cell(row.get("ratios", {}), peer) for peer in RATIOS),
    ]


def ratio_cell(ratios: dict[str, float], peer: str) -> str:
    """The ratio to one peer; to each mode of it where ``peer`` is an engine with several."""
    if peer in ratios:
        return f"{ratios[peer]:.2f}"
    modes = {n.removeprefix(f"{peer} "): r for n, r in ratios.items() if n.startswith(f"{peer} ")}
    return ", ".join(f"{ratio:.2f} {mode}" for mode, ratio in modes.items())


def terminal(results: Results) -> RenderableType:
    """The main table; without rows for it, what else there is to say."""
    if not _timed(results):
        return Group(*(Text(line) for line in (headline(results), *_notes(results))))
    notes = "\n".join([NOTE, *_notes(results)])
    table = Table(title=headline(results), caption=Text(notes), caption_justify="left")
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number < 3 else "right", no_wrap=number < 3)
    before = None
    for row, cells in zip(_timed(results), table_rows(results), strict=True):
        if before not in (None, (row["format"], row["tokens"])):
            table.add_section()
        before = row["format"], row["tokens"]
        table.add_row(*cells, style="bold" if row["engine"] == "pykernels" else "")
    return table


def _notes(results: Results) -> list[str]:
    """What was not timed, and what was timed beside other programs."""
    few = results["fewer_experts"]
    found = [*([f"{few}."] if few else []), *_missing(results["missing"])]
    missing: dict[str, list[str]] = {}
    for row in results["table"]:
        if "why" in row:
            what = f"{row['engine']} {row['backend']}: {row['why']}"
            missing.setdefault(what, []).append(f"{row['format']} x {row['tokens']}")
    found += [f"Not timed: {line}." for line in results["untimed"]]
    found += [f"Not timed: {what} ({', '.join(cases)})." for what, cases in missing.items()]
    if results["disturbed"]:
        parts = ", ".join(f"{name} ({share:.0%})" for name, share in results["disturbed"])
        found.append(f"Disturbed: others used more than 5 % of the processors during {parts}.")
    return found


def _missing(missing: dict[str, Any]) -> list[str]:
    """The line of a run that ended early; its parts are named "format: what"."""
    kinds: dict[str, list[str]] = {}
    for part in missing["parts"]:
        fmt, _, what = part.rpartition(": ")
        kinds.setdefault(what, []).extend([fmt] if fmt else [])
    parts = (f"{what} ({', '.join(fmts)})" if fmts else what for what, fmts in kinds.items())
    return [f"Missing, {missing['why']}: {'; '.join(parts)}."] if kinds else []


def headline(results: Results) -> str:
    """CPU, threads and layer in one line."""
    machine, shape = results["machine"], results["shape"]
    return (
        f"{machine['cpu']}, {results['settings']['threads']} of {machine['cores']} cores: "
        f"{shape['E']} experts of {shape['H']} x {shape['I']}, top-{shape['topk']}"
    )


def markdown(results: Results, plots: list[str]) -> str:
    """The whole run as a page; ``plots`` are file names beside it."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quick = (
        " Quick run: few rounds, few cases, few experts." if results["settings"]["quick"] else ""
    )
    lines = [
        f"# {headline(results)}",
        "",
        f"{machine['date']}.{quick} {versions}. {', '.join(machine['isa'])};"
        f" L3 {machine['l3_bytes'] >> 20} MiB, memory {machine['memory_bytes'] / 2**30:.0f} GiB,"
        f" huge pages {machine['huge_pages']}, load before the run {machine['load_before']};"
        f" took {machine['minutes']} minutes.",
        "",
        *(f"{line}\n" for line in _notes(results)),
        *_main(results),
        *_by_threads(results),
        *_under_skew(results),
        *(f"![{name}]({name})" for name in plots),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _grid(headings: tuple[str, ...], rows: list[list[str]], left: int) -> list[str]:
    rule = ["---" if number < left else "---:" for number in range(len(headings))]
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in ([*headings], rule, *rows)
    ]


def _main(results: Results) -> list[str]:
    rows = table_rows(results)
    return [NOTE, "", *_grid(HEADINGS, rows, left=3), ""] if rows else []


def _by_threads(results: Results) -> list[str]:
    if not results["threads"]:
        return []
    rows = [
        [r["format"], r["engine"], str(r["threads"]), f"{r['gbps']:.1f}", f"{r['read_roof']:.1f}"]
        for r in results["threads"]
    ]
    headings = "format", "engine", "threads", "GB/s", "read roof GB/s"
    return ["## One token against threads", "", *_grid(headings, rows, left=2), ""]


def _by_bytes(row: dict[str, Any]) -> str:
    """Time for each byte read against balanced's; blank where products bound both."""
    crowded = row["tokens"] * row["topk"] / row["experts"] > 8
    return "" if crowded else f"{row['against_balanced_a_byte']:.2f}"


def _under_skew(results: Results) -> list[str]:
    if not results["skew"]:
        return []
    first = results["skew"][0]
    rows = [
        [str(r["tokens"]), r["routing"], r["schedule"], f"{r['active']:.1f}", f"{r['busiest']:.1f}",
         f"{r['ms']:.1f}", f"{r['against_balanced']:.2f}", _by_bytes(r)]
        for r in results["skew"]
    ]  # fmt: skip
    headings = (
        "tokens", "routing", "schedule", "active experts", "busiest / mean", "ms",
        "time / balanced dynamic", "the same, for each byte read",
    )  # fmt: skip
    return [
        "## Scheduling under skew",
        "",
        f"{first['format']} on {first['backend']}, top-{first['topk']} of {first['experts']}"
        " experts; rows of as many tokens do the same FLOPs. balanced: as many tokens for every"
        " expert; zipf: the expert of rank r drawn with weight 1 / (r + 1); one: all tokens take"
        " the same experts. With few tokens skew means fewer distinct experts to read: compare the"
        " time for each byte there. Static: one contiguous share of a stage's tasks for each"
        " thread, a barrier for all between stages.",
        "",
        *_grid(headings, rows, left=3),
        "",
    ]
