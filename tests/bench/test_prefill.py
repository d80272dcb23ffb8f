"""`pykernels bench prefill`: what its figures mean, as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.prefill.run import overlap
from bench.prefill.table import draw, table

ROWS = [
    {"way": "cpu", "tokens": 64, "tok_s": 1000.0},
    {"way": "stream", "tokens": 64, "tok_s": 400.0, "link_share": 0.95, "overlap": 0.5},
    {"way": "cpu", "tokens": 4096, "tok_s": 2132.4},
    {"way": "stream", "tokens": 4096, "tok_s": 24000.0, "link_share": 0.88},
]


def test_overlap_is_what_one_hides_of_the_other() -> None:
    """150 ms of copies beside 80 ms of kernels."""
    assert overlap(0.15, 0.15, 0.08) == pytest.approx(1.0)
    assert overlap(0.19, 0.15, 0.08) == pytest.approx(0.5)
    assert overlap(0.24, 0.15, 0.08) == 0.0


def test_a_line_for_each_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(table(ROWS))
    words = [line.split() for line in console.export_text().splitlines()]
    assert words[1:] == [["64", "1000", "400", "95%", "50%"], ["4096", "2132", "24000", "88%"]]
    results = {"model": "a model", "format": "fp8", "gpu": "a GPU", "rows": ROWS}
    draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
