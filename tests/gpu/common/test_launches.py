"""What is asked of all ops alike, under compute-sanitizer too, is asked of every kernel."""

from __future__ import annotations

from ..launches import launchable
from ..uninterpreted import run_module


def test_every_kernel_is_launched_by_a_row() -> None:
    """On an H200, whose plans the rows' sizes lead to: no kernel is for other GPUs alone."""
    assert set(run_module("launches").split()) == launchable()
