"""What ``tune`` asks of a job, one line of the file of tuned plans: see ``products``, say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

Calls = tuple[Callable[[Any], object], int]
"""(a call that takes a plan, input sets it rotates over)."""
Kept = dict[str, Any]
"""Weights that the next job may take too; at most one job's are kept."""


class Job(Protocol):
    """An operation at one size.

    Attributes:
        params: op, format and sizes, flat: columns of the row that is printed.
    """

    @property
    def op(self) -> str: ...

    @property
    def params(self) -> dict[str, Any]: ...

    def candidates(self, capability: tuple[int, int]) -> list[Any]:
        """Plans to time on a GPU of this compute capability."""
        ...

    def shipped(self, device: torch.device) -> Any:
        """The plan that is taken where none is tuned, to be compared with; None: not known."""
        ...

    def kernel(self, plan: Any) -> tuple[object, Any]:
        """(what a compilation depends on, a plan that compiles it)."""
        ...

    def calls(self, device: torch.device, kept: Kept) -> Calls:
        """The calls of each plan on a device; on "meta" nothing is computed."""
        ...

    def write(self, device_name: str, plan: Any) -> Path:
        """Puts the line into the file."""
        ...
