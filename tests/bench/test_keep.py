"""What a kept file holds: the machine, the command as typed, what was printed before it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.keep import main


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ('{"tok_s": 3.5}', {"rows": [{"tok_s": 3.5}]}),
        ('{"model": "m", "rows": [1, 2]}', {"model": "m", "rows": [1, 2]}),
        ('{"way": 1}\n{"way": 2}', {"rows": [{"way": 1}, {"way": 2}]}),
        ("ok: nine answers", {"lines": ["ok: nine answers"]}),
    ],
)
def test_figures_are_kept_with_machine_and_command(
    printed: str, kept: dict[str, object], tmp_path: Path
) -> None:
    command = ["python", "-c", f"print({printed!r}); raise SystemExit(3)"]
    for _ in range(2):  # no run takes the place of another
        assert main(["name", "--out", str(tmp_path), "--", *command]) == 3
    first, second = sorted(tmp_path.glob("*/*-name*.json"), key=lambda path: len(path.name))
    assert second.stem == f"{first.stem}-2"
    found = json.loads(first.read_text())
    assert found["machine"]["slug"] == first.parent.name
    assert found["command"].startswith("python -c ") and found["exit_code"] == 3
    assert kept.items() <= found.items()
