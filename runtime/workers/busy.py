"""What the workers did in a step, from the times of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .job import Job


@dataclass(frozen=True)
class BusyTimes:
    """How the workers spent the time of a step.

    Attributes:
        busy: seconds in which they had something to do.
        waits: seconds of each wait for another device between two jobs, 0 where its flag was there.
    """

    busy: float
    waits: tuple[float, ...]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> BusyTimes:
        """The times of the step that ran last."""
        busy, ended, waits = 0, 0, []
        for job in jobs:
            begun, complete = job.times
            if job.wait_for and ended:
                waits.append(max(0, begun - ended) / 1e9)
            busy += max(0, complete - max(begun, ended))
            ended = max(ended, complete)
        return cls(busy / 1e9, tuple(waits))
