"""The result of ``pykernels eval lossless`` as rows of a table and as files."""

from __future__ import annotations

import json
from pathlib import Path

from .lossless import Result, Row
from .made import made_by

TITLES = ("way", "perplexity", "plainest's", "rms", "the same", "largest", "at work")


def write(result: Result, folder: Path, date: str) -> list[Path]:
    """Writes ``DATE-lossless-DEVICE`` as .md and .json."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{date}-lossless-{result.device.replace(':', '').replace(',', '-')}"
    page, numbers = folder / f"{stem}.md", folder / f"{stem}.json"
    numbers.write_text(json.dumps(made_by() | result.as_dict(), indent=1) + "\n")
    page.write_text(markdown(result))
    return [page, numbers]


def cells(row: Row, digits: int = 15) -> tuple[str, ...]:
    """A row of the table, in the order of ``TITLES``; perplexities to so many digits."""
    if row.refused:
        return row.name, "", "", "", "not here", "", ""
    return (
        row.name,
        f"{row.perplexity:.{digits}g}",
        f"{row.plain:.{digits}g}",
        f"{row.rms:.1e}",
        verdict(row),
        f"{row.largest:.1e}",
        row.shown,
    )


def verdict(row: Row) -> str:
    """What the differences say."""
    if not row.shown:
        return "WAS NOT AT WORK"
    if row.equal:
        return "bit for bit"
    if row.within:
        return f"{_digits(row)} digits"
    return "ANOTHER MODEL" if row.lossless else "another model"


def _digits(row: Row) -> int:
    """Leading digits that both perplexities have, once rounded."""
    digits = 1
    while digits < 15 and f"{row.perplexity:.{digits}e}" == f"{row.plain:.{digits}e}":
        digits += 1
    return digits


def summary(result: Result) -> list[str]:
    """What follows from the rows."""
    kept = [row for row in result.rows if row.lossless and not row.refused]
    exact = sum(row.equal for row in kept)
    lines = [
        f"{sum(row.right for row in kept)} of {len(kept)} ways that must not change the model do"
        f" not: {exact} bit for bit, the others by less than {result.allowed:.1e} (rms of a token's"
        " log-probability)."
    ]
    lines += [f"{row.name}: not here: {row.refused}" for row in result.rows if row.refused]
    wrong = [row.name for row in result.rows if not row.right]
    return [*lines, f"Not as it must be: {', '.join(wrong)}."] if wrong else lines


def markdown(result: Result) -> str:
    """The page."""
    allowed = (
        "some roundings of float32"
        if result.device == "ref"
        else "twice what the plainest way differs by from the same weights in float32"
    )
    lines = [
        f"# Perplexity in every lossless way, on {result.device}",
        "",
        f"{result.model} on {result.cpu}, kernel {result.kernel}; the first {result.length} tokens"
        f" of {result.documents} held-out files of Python {result.python}'s library,"
        f" {result.prompt} of each as a prompt, the others as if the model wrote them. The plainest"
        " way, one request after another and every pass off, gives"
        f" {result.perplexity:.15g}. rms and largest: of the differences of single tokens' natural"
        " log-probabilities to the plainest way's; the same: digits of both perplexities that are."
        f" Allowed rms: {result.allowed:.2e}, {allowed}. The last two ways do change the model, and"
        " show what the measure sees. SMOE's Table II has the perplexities of five answers in these"
        " places.",
        "",
        f"| {' | '.join(TITLES)} |",
        "|---" * len(TITLES) + "|",
        *(f"| {' | '.join(cells(row))} |" for row in result.rows),
        "",
        *(f"- {line}" for line in summary(result)),
    ]
    return "\n".join(lines) + "\n"
