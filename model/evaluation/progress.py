"""How long work is told about."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int], Callable[[int], None]]
"""Told what begins and of how many requests; returns what is told of those that are done."""
