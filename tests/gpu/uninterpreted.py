"""Runs a module of these tests with Triton's compiler: whoever imports Triton chooses for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_module(name: str, *arguments: str, timeout: int = 300) -> str:
    """What ``python -m tests.gpu.<name>`` prints; it must succeed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.gpu.{name}", *arguments]
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    result = subprocess.run(command, **how, timeout=timeout)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout
