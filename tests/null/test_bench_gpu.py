"""The GPU benchmark's own tests, in a process of their own: tests do not import bench."""

from __future__ import annotations

import re

from .test_bench_cpu import pytest_of


def test_the_benchmarks_own_tests_pass() -> None:
    result = pytest_of("bench/gpu/tests")
    assert result.returncode == 0, result.stdout[-4000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) > 25, result.stdout[-4000:]
