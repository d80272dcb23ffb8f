"""What the suites of the GPU share: their clock and the GPU's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Clock:
    """pytest-benchmark's timer: it stands still but for the seconds that somebody else measured."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def tell(self, benchmark: Any, seconds: list[float]) -> None:
        """A round for each of these."""
        left = iter(seconds)

        def turn() -> None:
            self.now += next(left)

        benchmark.pedantic(turn, rounds=len(seconds))


CLOCK = Clock()


def name(device: torch.device) -> str:
    """Returns the device's name for the table's title."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
