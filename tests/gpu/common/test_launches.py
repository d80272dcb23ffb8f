"""What is asked of all ops alike, under compute-sanitizer too, is asked of every kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..launches import launchable


def test_every_kernel_is_launched_by_a_row() -> None:
    """On an H200, whose plans the rows' sizes lead to: no kernel is for other GPUs alone."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.launches"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(result.stdout.split()) == launchable()
