"""Every kernel compiles for Hopper, without a GPU; none spills, or asks for, too much.

For Ampere, Ada and Blackwell too, where there is a GPU machine's number of cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(HERE.parents[1]).with_suffix("").parts)
    for path in HERE.rglob("test_*.py")
    if "\nCOMPILES" in path.read_text()
)
MOST_STACK = 256
"""Bytes a thread: a few spilled registers are no failure, a local array is."""


SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability."""
ARCHS = [
    pytest.param(arch, marks=[] if arch == 90 else [pytest.mark.gpu])  # a minute each
    for arch in SHARED
]


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    jobs = max(1, len(os.sched_getaffinity(0)) // 4)  # there may be other tests beside this one
    options = ["--arch", str(arch), "--jobs", str(jobs)]
    command = [sys.executable, "-m", "tests.gpu.compiles", *options]
    result = subprocess.run(
        [*command, *MODULES],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    failed = [row for row in rows if "why" in row]
    assert result.returncode == 0 and rows, f"{failed}\n{result.stderr[-2000:]}"
    assert {row["module"] for row in rows} == set(MODULES)
    too_large = [row for row in rows if row["shared"] > SHARED[arch] * 1024]
    assert not too_large, too_large
    spilled = [row for row in rows if row.get("stack", 0) > MOST_STACK]
    assert not spilled, spilled
