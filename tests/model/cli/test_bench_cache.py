"""`pykernels bench cache`: recorded choices through the engine's cache, as rows, table and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cache.run import since, slots_of
from bench.cache.table import draw, tables
from runtime.experts.cache import CacheStats

from ..conftest import Run, failed

MEASURED = {
    "kind": "measured",
    "policy": "lfu",
    "slots": 8,
    "share": 0.25,
    "swaps": 1,
    "hit_rate": 0.5,
    "cpu_bytes": 0.5,
    "swaps_per_step": 0.2,
    "decode_tok_s": 250.0,
    "bytes_per_step": 10**8,
    "cpu_busy": 0.7,
    "ttft_ms_512": 240.0,
}


def test_rows_of_the_embedded_model(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = ("--texts", 2, "--prompt", 40, "--tokens", 24, "--shares", "25,50", "--threads", 1)
    sizes += ("--kernel", "generic")
    result = run("bench", "cache", *sizes, "--plot", tmp_path / "hits.png", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["experts"], found["topk"]) == (32, 6)
    rows = found["rows"]
    assert {(row["slots"], row["policy"], row["swaps"]) for row in rows} == {
        (slots, policy, swaps)
        for slots in (8, 16)
        for policy in ("lfu", "lru", "lfu-fixed", "lru-fixed")
        for swaps in range(4)
    }
    for row in rows:  # one token takes an expert once
        assert row["cpu_bytes"] == pytest.approx(1 - row["hit_rate"], abs=2e-4)
    few, many = (max(r["hit_rate"] for r in rows if r["slots"] == n) for n in (8, 16))
    assert 0 < few < many < 1
    assert (tmp_path / "hits.png").stat().st_size > 1000
    assert (found["complete"], found["missing"]) == (True, [])
    both = {**found, "rows": [*rows, {**MEASURED, "slots": 0, "share": 0.0}, MEASURED]}
    draw(both, tmp_path / "both.png")
    _, simulated, measured = tables(both)
    assert (simulated.row_count, measured.row_count) == (32, 2)
    failed(run("bench", "cache", "--shares", "0,50"), "numbers from 1 to 99")


def test_shares_are_slots() -> None:
    assert slots_of([0.001, 0.1, 0.99], 32) == [1, 3, 31]
    late, early = CacheStats(10, 5, 8, 4, 3), CacheStats(4, 1, 4, 3, 2)
    assert since(late, early) == CacheStats(6, 4, 4, 1, 1)
