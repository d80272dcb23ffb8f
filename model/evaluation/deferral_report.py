"""The result of ``pykernels eval deferral`` as files: a page, its numbers, a plot."""

from __future__ import annotations

import json
from pathlib import Path

from .deferral import METHODS, Result, Row
from .made import made_by


def write(result: Result, folder: Path, date: str) -> list[Path]:
    """Writes ``DATE-deferral`` as .md, .json and, where there is matplotlib, .png."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{date}-deferral"
    page, numbers = folder / f"{stem}.md", folder / f"{stem}.json"
    numbers.write_text(json.dumps(made_by() | result.as_dict(), indent=1) + "\n")
    plot = _draw(result, folder / f"{stem}.png")
    page.write_text(markdown(result, plot.name if plot else None))
    return [page, numbers, *([plot] if plot else [])]


def summary(result: Result) -> list[str]:
    """The findings, in sentences that follow from the numbers alone."""
    by_method = {(row.method, row.affected): row for row in result.rows}
    numbers = sorted({row.affected for row in result.rows if row.affected})
    pairs = [(N, by_method["skipping", N], by_method["deferral", N]) for N in numbers]
    if not pairs:
        return []
    better = [N for N, skipped, deferred in pairs if deferred.change < skipped.change]
    N, skipped, deferred = pairs[-1]
    return [
        f"Deferral costs less than skipping for {_numbers(better)} of {_numbers(numbers)} affected"
        " experts.",
        f"With {N} of {result.topk} affected: skipping {skipped.change:+.2f} %, deferral"
        f" {deferred.change:+.2f} % of bits a byte.",
    ]


def markdown(result: Result, plot: str | None) -> str:
    """The page."""
    head = "| affected | " + " | ".join(
        f"{method}: bits a byte | change | same next token | right" for method in METHODS
    )
    lines = [
        "# Expert Deferral against Expert Skipping",
        "",
        f"{result.model}, {result.topk} experts a token; the first {result.length} tokens of"
        f" {result.documents} held-out files of Python {result.python}'s library, {result.tokens}"
        f" positions, teacher-forced through decode programs on {result.cpu}. Skipped experts are"
        " dropped in every layer, the other weights stay; nothing is deferred out of the last"
        " layer. Change: of bits a byte, with its standard error over the"
        " files. SOSP'25 Figure 13 has DeepSeek-V3's scores on LiveBench in these places.",
        "",
        head + " |",
        "|---" * (1 + 4 * len(METHODS)) + "|",
    ]
    numbers = sorted({row.affected for row in result.rows})
    for N in numbers:
        cells = [_cells(find(result, method, N)) for method in METHODS]
        lines.append(f"| {N} | " + " | ".join(cells) + " |")
    lines += ["", *summary(result)]
    if plot:
        lines += ["", f"![{plot}]({plot})"]
    return "\n".join(lines) + "\n"


def find(result: Result, method: str, affected: int) -> Row:
    """A row; with none affected all methods are one."""
    method = method if affected else "none"
    return next(row for row in result.rows if (row.method, row.affected) == (method, affected))


def _cells(row: Row) -> str:
    change = f"{row.change:+.2f} ± {row.error:.2f} %" if row.affected else ""
    return f"{row.bits_per_byte:.4f} | {change} | {row.agreement:.2%} | {row.accuracy:.2%}"


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _draw(result: Result, path: Path) -> Path | None:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    numbers = sorted({row.affected for row in result.rows})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for method, marker in zip(METHODS, "sD", strict=True):
        rows = [find(result, method, N) for N in numbers]
        left.errorbar(
            numbers,
            [row.change for row in rows],
            [row.error for row in rows],
            marker=marker,
            label=method,
            capsize=3,
        )
        right.plot(numbers, [100 * row.agreement for row in rows], marker=marker, label=method)
    left.set_ylabel("change of bits a byte, %")
    right.set_ylabel("same likeliest next token, %")
    for axes in (left, right):
        axes.set_xlabel(f"affected experts of {result.topk}")
        axes.set_xticks(numbers)
        axes.grid(True, alpha=0.2)
        axes.legend()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)
    return path
