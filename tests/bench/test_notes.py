"""Every figure in notes and READMEs has a file behind it, and every file says how it was made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
NOTES = sorted((ROOT / "bench/notes").glob("*.md"))
PAGES = [*NOTES, *(ROOT / name for name in ("README.md", "bench/README.md", "model/README.md"))]
PAGES += [ROOT / name for name in ("model/large_models.md", "model/server/README.md")]

MEASURED = re.compile(
    r"\d ?(%|x\b|tok/s|tokens/s|ms\b|us\b|GB/s|TFLOP/s|GFLOP/s)"
    r"|(tok/s|GB/s|TFLOP/s|times faster|share of the|\bus\b|\bms\b)[^|]*\|"  # a column's head
    r"|\| *\**[\d.,; /-]*\d[\d.,; /-]*\** *(\(|\|)"  # a cell of numbers
)
"""What a measured figure looks like."""
LINK = re.compile(r"results/[\w./-]+\.(?:md|jsonl?)\)")
EXEMPT = "<!-- no measurement:"
"""Begins a comment that says why figures, such as a specification's, have no file."""


def unfiled_tables(text: str) -> list[str]:
    """First lines of the tables with figures that link no result: not themselves, nor in the
    paragraph before or behind them."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip()]
    found = []
    for i, block in enumerate(blocks):
        near = "\n\n".join(blocks[max(0, i - 1) : i + 2])
        if block.startswith("|") and MEASURED.search(block):
            if not LINK.search(near) and EXEMPT not in near:
                found.append(block.splitlines()[0])
    return found


def unfiled_sections(text: str) -> list[str]:
    """Headings of the sections with figures that link no result, where the page's first paragraphs
    do not either."""
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    if LINK.search(first):
        return []
    return [
        section.splitlines()[0]
        for section in (first, *sections)
        if MEASURED.search(section) and not LINK.search(section) and EXEMPT not in section
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_figures_link_their_file(page: Path) -> None:
    assert unfiled_tables(page.read_text()) == []


@pytest.mark.parametrize("page", NOTES, ids=lambda page: page.name)
def test_figures_of_a_note_link_their_file(page: Path) -> None:
    assert unfiled_sections(page.read_text()) == []


def test_a_table_without_a_file_is_found() -> None:
    table = "| model | tok/s |\n|---|---|\n| a | 12 |"
    assert unfiled_tables(f"# Speeds\n\n{table}\n\nFast.") == ["| model | tok/s |"]
    assert unfiled_tables(f"[Run](../results/m/2031-02-03.json):\n\n{table}") == []
    assert unfiled_tables(f"{table}\n\n{EXEMPT} the maker's figures -->") == []
    assert unfiled_sections("# A\n\n## B\n\nIt takes 12 us.\n") == ["## B"]


def test_results_say_how_they_were_made() -> None:
    """Machine and command in the file, or the file with its command in the list."""
    listed = (RESULTS / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[[^]]+\]\(([^)]+)\).* \| `(.+)` \|$", listed, re.MULTILINE))
    assert [name for name in rows if not (RESULTS / name).is_file()] == []
    for path in sorted(RESULTS.glob("*/*.json*")):
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        data = [json.loads(line) for line in lines][0]
        made = ("machine" in data or "cpu" in data) and ("command" in data or "settings" in data)
        assert made or path.relative_to(RESULTS).as_posix() in rows, path
    pages = set(RESULTS.glob("*/*.md"))
    assert {page for page in pages if not page.with_suffix(".json").is_file()} == set()
