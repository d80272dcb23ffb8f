"""Rows that a benchmark has measured are there however it ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from bench.harness.keeping.kept import keeping

PLAN = [{"way": "cpu", "tokens": n} for n in (64, 512, 4096)]
HEAD = {"model": "a model", "format": "fp8", "layers": 1, "gpu": "a GPU"}


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def broken() -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("end", "error", "why"),
    [
        (stopped, KeyboardInterrupt, "it was interrupted"),
        (broken, ZeroDivisionError, "ZeroDivisionError: a bug"),
    ],
)
def test_a_run_that_ends_early_loses_no_row(
    end, error: type[BaseException], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    with pytest.raises(error), keeping("prefill", file, True) as kept:
        kept.head, kept.plan = HEAD, PLAN
        kept.add(PLAN[0] | {"tok_s": 1000.0})
        now = json.loads(file.read_text())  # what a crash of the process here would leave
        assert (now["complete"], len(now["rows"])) == (False, 1)
        kept.add(PLAN[1] | {"why": "out of memory"})
        end()
    found = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["rows"] == [PLAN[0] | {"tok_s": 1000.0}, PLAN[1] | {"why": "out of memory"}]
    assert (found["complete"], found["missing"], found["why"]) == (False, PLAN[1:], why)
