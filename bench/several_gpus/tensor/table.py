"""A whole model on several GPUs as a table, and as a plot of tokens a second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.timing.rows import Row

from ..unsteady import unsteady

if TYPE_CHECKING:
    from rich.table import Table

Results = dict[str, Any]


def line(row: Row) -> str:
    """A row for the terminal."""
    text = f"{row['tok_s']:.1f} tokens/s"
    return f"{text}, {row['x_first']:.2f} x" if "x_first" in row else text


def case_of(row: Row) -> str:
    """What a row is of, in words."""
    return f"prompt, {row['tokens']}" if row["op"] == "prompt" else f"decode, {row['batch']}"


def tables(results: Results) -> list[str | Table]:
    """What was timed, and a line for each case: tokens a second by way, and x of the first."""
    from rich.table import Table

    r = results | {"gpu": results["gpu"] or "no GPU"}
    head = (
        "{model}, {layers} layers, {format}, cache in {kv_dtype}; {gpu} as {device}; decode of"
        " sequences at a context of {context}"
    )
    ways = list(dict.fromkeys(row["way"] for row in r["rows"]))
    made = Table(box=None, pad_edge=False)
    made.add_column("tokens/s")
    for i, way in enumerate(ways):
        made.add_column(way, justify="right")
        if i:
            made.add_column("x", justify="right")
    for case in dict.fromkeys(map(case_of, r["rows"])):
        own = {row["way"]: row for row in r["rows"] if case_of(row) == case}
        cells = [case]
        for i, way in enumerate(ways):
            row = own.get(way, {})
            cells.append(f"{row['tok_s']:.1f}" if row else "")
            if i:
                cells.append(f"{row['x_first']:.2f}" if "x_first" in row else "")
        made.add_row(*cells)
    apart = unsteady(r["rows"], lambda row: f"{row['way']}, {case_of(row)}")
    return [head.format_map(r), made, *apart]


def draw(results: Results, path: Path) -> None:
    """Writes the plot: a panel for prompts, one for decode. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = results["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, panels = plt.subplots(
        1, len(ops), figsize=(1 + 4 * len(ops), 3.6), layout="constrained", squeeze=False
    )
    for axes, op in zip(panels[0], ops, strict=True):
        sizes = {"prompt": "tokens", "decode": "batch"}[op]
        cases = list(dict.fromkeys(row[sizes] for row in rows if row["op"] == op))
        width = 0.8 / len(ways)
        for i, way in enumerate(ways):
            own = [row for row in rows if row["op"] == op and row["way"] == way]
            at = [cases.index(row[sizes]) - 0.4 + width * (i + 0.5) for row in own]
            high = [row["tok_s"] for row in own]
            axes.bar(at, high, width, color=f"C{i}", label=way)
            for x, row in zip(at, own, strict=True):
                if "x_first" in row:
                    text = f"{row['x_first']:.2f} x"
                    axes.text(x, row["tok_s"], text, ha="center", va="bottom", fontsize=7)
        axes.set_xticks(range(len(cases)), [str(case) for case in cases])
        label = "tokens of the prompt" if op == "prompt" else "sequences"
        axes.set(xlabel=label, ylabel="tokens/s", title=op)
        axes.grid(True, axis="y", alpha=0.2)
        axes.legend(fontsize=7)
    gpu = results["gpu"] or "no GPU"
    figure.suptitle(f"{results['model']} {results['format']}, {gpu}", fontsize=9)
    figure.savefig(path, dpi=100, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)
