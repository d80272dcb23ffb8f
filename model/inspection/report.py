"""An inspection as a person reads it: a tree, layers that are alike in one, totals below."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from .entries import Entry
from .examine import Inspection
from .gpu_experts import SUFFIX, GpuShare

_LAYER = re.compile(r"(?P<list>.*\blayers)\.(?P<i>\d+)\.(?P<rest>.+)$")
OURS = "•"


def table(result: Inspection) -> Table:
    """Modules with weights of their own; layers that are the same, but for their number, summed."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column("module", no_wrap=True)
    made.add_column("class", no_wrap=True, overflow="ellipsis")
    for title in ("device", "format"):
        made.add_column(title, no_wrap=True)
    for title in ("parameters", "bytes", "per token"):
        made.add_column(title, justify="right", no_wrap=True)
    for first, last, group in layers(result.entries):
        _add(made, result, first, last, group)
    return made


def summary(result: Inspection) -> list[str]:
    """The lines below the table."""
    lines = [
        f"{device:<8}{count(numbers):>8} parameters {size(nbytes):>12}"
        for device, (numbers, nbytes) in result.devices.items()
    ]
    routed, other = result.parameters(True), result.parameters(False)
    kinds = [f"{size(nbytes)} in {kind}" for kind, nbytes in result.cache_bytes.items()]
    cache = ", ".join(kinds) or "unknown"
    lines += [
        f"{count(routed + other)} parameters: {count(routed)} in routed experts, {count(other)} in"
        " everything else",
        f"a token reads {size(result.token_bytes)} of weights; its part of the KV cache: {cache}",
    ]
    if result.state_bytes:
        lines.append(f"a sequence keeps {size(result.state_bytes)} of states, whatever its length")
    if result.window:
        lines.append(
            f"{size(result.window_bytes)} of it in bf16 are of layers that keep the last"
            f" {result.window} tokens alone"
        )
    if result.gpu_share is not None:
        lines += _gpu_share(result.gpu_share)
    if result.engine:
        lines.append("the engine runs it: every module on our kernels")
    else:
        lines.append(f"eager, as {result.reason}: {OURS} on our kernels, else transformers' own")
    return lines


def layers(entries: Sequence[Entry]) -> Iterator[tuple[int, int, list[list[Entry]]]]:
    """(first, last, rows) of runs of layers that are alike, each row the entries that it sums up;
    (-1, -1, [[entry]]) of what is in no layer."""

    def key(entry: Entry) -> tuple[str, int]:
        match = _LAYER.match(entry.name)
        return (match["list"], int(match["i"])) if match else (entry.name, -1)

    runs: list[tuple[int, int, list[list[Entry]]]] = []
    for (_, i), group in groupby(entries, key):
        one = list(group)
        if i > 0 and runs and runs[-1][1] == i - 1 and _alike(runs[-1][2], one):
            first, _, rows = runs.pop()
            runs.append((first, i, [[*row, e] for row, e in zip(rows, one, strict=True)]))
        else:
            runs.append((i, i, [[entry] for entry in one]))
    yield from runs


def _alike(rows: list[list[Entry]], layer: list[Entry]) -> bool:
    return [_kind(row[0]) for row in rows] == [_kind(entry) for entry in layer]


def _kind(entry: Entry) -> tuple[object, ...]:
    match = _LAYER.match(entry.name)
    assert match is not None
    if match["rest"].endswith(SUFFIX):  # by a profile each layer has other numbers of them
        return (match["rest"], entry.device, entry.format)
    return (match["rest"], entry.cls, entry.ours, entry.device, entry.format, entry.bytes)


def _add(made: Table, result: Inspection, first: int, last: int, rows: list[list[Entry]]) -> None:
    """Rows of a run of layers under a heading, or of one module."""
    shown: list[str] = []  # headings that stand above
    for row in rows:
        head = row[0]
        match = _LAYER.match(head.name)
        if match is None:
            made.add_row(*_cells(head.name, 0, row, result))
            continue
        top = f"{match['list']}.{first}" + (f"-{last}" if last > first else "")
        real = f"{match['list']}.{first}"
        if not shown:
            made.add_row(Text(top, style="bold"), Text(result.classes.get(real, ""), "dim"))
        *parents, leaf = match["rest"].split(".")
        for depth in range(len(parents)):
            path = ".".join(parents[: depth + 1])
            if path not in shown:
                shown.append(path)
                cls = result.classes.get(f"{real}.{path}", "")
                made.add_row("  " * (depth + 1) + parents[depth], Text(cls, "dim"))
        shown.append(match["rest"])
        made.add_row(*_cells(leaf, len(parents) + 1, row, result))


def _cells(leaf: str, depth: int, row: list[Entry], result: Inspection) -> list[str]:
    one = row[0]
    mark = f" {OURS}" if one.ours and not result.engine else ""
    read = sum(entry.token_bytes for entry in row)
    return [
        "  " * depth + leaf,
        _classes(row) + mark,
        one.device,
        one.format,
        count(sum(entry.parameters for entry in row)),
        size(sum(entry.bytes for entry in row)),
        size(read) if read else "",
    ]


def _gpu_share(gpu: GpuShare) -> list[str]:
    how = "as the profile has it" if gpu.profiled else "if it takes all alike"
    return [
        f"{gpu.experts} experts of {gpu.layers} layers are on the GPU too, {size(gpu.bytes)}: a"
        f" token takes {gpu.share:.1%} of its experts there {how}",
        f"so the CPU reads {size(gpu.cpu_token_bytes)} of experts a token, not {size(gpu.without)}",
    ]


def _classes(row: list[Entry]) -> str:
    """The class of all, or from the first to the last as text sorts their numbers."""
    names = sorted({entry.cls for entry in row}, key=lambda name: (len(name), name))
    return names[0] if len(names) == 1 else f"{names[0].split()[0]} to {names[-1]}"


def count(number: int) -> str:
    """654.1B, 17.3M, 256."""
    for unit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.{2 if suffix == 'T' else 1}f}{suffix}"
    return str(number)


def size(nbytes: int) -> str:
    """1.5 GiB, 14.0 KiB."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} B"
