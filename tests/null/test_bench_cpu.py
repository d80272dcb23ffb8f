"""The benchmark's own tests, in a process of their own: tests do not import bench."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pytest_of(folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_benchmarks_own_tests_pass() -> None:
    result = pytest_of("bench/cpu/tests")
    assert result.returncode == 0, result.stdout[-4000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) > 40, result.stdout[-4000:]


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
