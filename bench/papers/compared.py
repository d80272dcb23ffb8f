"""A committed row with what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.devices.sim.routing import Routing

from .rows import Row


@dataclass(frozen=True)
class Compared:
    """A row with its prediction, in the row's unit; ``why_not``: for which it does not count."""

    row: Row
    predicted: float
    bound: str
    routing: Routing
    why_not: str = ""

    @property
    def error(self) -> float:
        """How far the predicted time is from the measured one, relative to it."""
        if self.row.kind == "decode":
            return self.predicted / self.row.measured - 1
        return self.row.measured / self.predicted - 1

    @property
    def counts(self) -> bool:
        """Whether the row tells something of the simulator."""
        return not self.why_not
