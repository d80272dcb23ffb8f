"""The benchmark's command line, in a process of its own: tests do not import bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_line_refuses_in_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "bench.cpu", "--formats", "fp9", "--no-peers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
