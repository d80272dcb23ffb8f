"""`pykernels bench prefill`: what its figures mean, as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench.prefill.run import overlap, plan, rows
from bench.prefill.table import draw, table
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

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


class Timer:
    """An engine that has no room for long prompts."""

    runner = SimpleNamespace(close=lambda: None)

    def prefill(self, tokens: int) -> float:
        if tokens > 64:
            raise MemoryError("too long")
        return tokens / 1000

    def close(self) -> None:
        pass


class Engines:
    """What makes them; one way there is not."""

    def timer(self, _: Any, execution: ExecutionConfig, __: Any) -> Timer:
        if execution.prefill == "split":
            raise PykernelsError("no split", "Use stream")
        return Timer()


def test_a_row_that_fails_says_why_and_the_others_go_on() -> None:
    ours: Any = Engines()
    found = list(rows(ours, (64, 4096), ExecutionConfig(device="cuda:0"), rounds=1))
    named = [{key: row[key] for key in ("way", "tokens")} for row in found]
    assert named == plan((64, 4096))
    timed = {row["way"] for row in found if row.get("tok_s") == 1000}
    assert timed == {"cpu", "stream", "auto"}
    whys = {(row["way"], row["tokens"]): row["why"] for row in found if "why" in row}
    assert whys["cpu", 4096] == "MemoryError: too long"
    assert whys["split", 64] == whys["split", 4096] == "no split. Use stream."
