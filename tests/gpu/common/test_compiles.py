"""Every kernel compiles for Hopper, without a GPU; none spills, or asks for, too much.

For Ampere, Ada and Blackwell too, where there is a GPU machine's number of cores.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ..uninterpreted import ROOT, run_module

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in Path(__file__).parents[1].rglob("test_*.py")
    if "\nCOMPILES = " in path.read_text()
)
MOST_STACK = 256
"""Bytes a thread: a few spilled registers are no failure, a local array is."""


SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability."""
# A minute of two cores each: Hopper's everywhere with --all, every one where there is a GPU.
MARK = {90: [] if torch.cuda.is_available() else [pytest.mark.all]}
ARCHS = [pytest.param(arch, marks=MARK.get(arch, [pytest.mark.gpu])) for arch in SHARED]


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    jobs = max(1, len(os.sched_getaffinity(0)) // 4)  # there may be other tests beside this one
    options = ["--arch", str(arch), "--jobs", str(jobs), *["--all"] * torch.cuda.is_available()]
    printed = run_module("compiles", *options, *MODULES, timeout=900)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert {row["module"] for row in rows} == set(MODULES)
    too_large = [row for row in rows if row["shared"] > SHARED[arch] * 1024]
    assert not too_large, too_large
    spilled = [row for row in rows if row.get("stack", 0) > MOST_STACK]
    assert not spilled, spilled
