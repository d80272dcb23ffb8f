"""The commit that the project's files are of, for results to name it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds the project's packages: its checkout, or site-packages."""


def commit() -> str | None:
    """Short name of the checkout's commit; None outside of one."""
    if not (ROOT / "pyproject.toml").is_file():  # site-packages may lie in another's checkout
        return None
    return _git("rev-parse", "--short", "HEAD")


def dirty() -> bool:
    """Whether a Python file of the checkout is not as its commit has it."""
    return commit() is not None and bool(_git("status", "--porcelain", "--", "*.py"))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
