"""Detects other users of the machine: a disturbed part of the run is measured again.

Another program on one core slows a spinning or statically split peer far more than it slows us, so
ratios taken beside one flatter us. Processor time that is neither ours nor a peer's, hypervisor
steal included, is counted over each part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil

LIMIT = 0.05
"""Share of the machine's processor time that others may take."""

_TRIES, _LOOK = 3, 0.5  # times a part, seconds

Reading = tuple[float, float]


def others(before: Reading, after: Reading, cores: int, wall: float) -> float:
    """Share of ``cores`` that others used between two ``clock`` readings ``wall`` seconds apart."""
    busy, ours = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (busy - ours) / (cores * wall))


def clock() -> Reading:
    """Processor seconds since the start: (of the whole machine, of us and the live peers)."""
    all_times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    busy = sum(getattr(all_times, name, 0.0) for name in names)
    me = psutil.Process()
    ours = sum(me.cpu_times()[:4])  # user, system, and those of children that have ended
    for child in me.children(recursive=True):
        try:
            ours += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return busy, ours


def _collect(rows: list[dict[str, Any]], part: Callable[[], list[dict[str, Any]]]) -> None:
    rows.extend(part())


class Watch:
    """Runs parts of a benchmark when it is quiet, again if it was not.

    Args:
        spare: seconds that waiting and repeating may take in all.

    Attributes:
        disturbed: name and others' share of each part that never had a quiet run.
    """

    def __init__(self, spare: float) -> None:
        self._spare = spare
        self.disturbed: list[tuple[str, float]] = []
        self._cores = psutil.cpu_count() or 1

    def run(
        self, name: str, part: Callable[[], list[dict[str, Any]]], tries: int = _TRIES
    ) -> list[dict[str, Any]]:
        """The rows of the quietest of up to ``tries`` runs; the first quiet one ends it, as does
        the end of the time to spare."""
        best: tuple[float, list[dict[str, Any]]] | None = None
        for attempt in range(tries):
            start = time.monotonic()
            self._wait()
            began = time.monotonic()
            rows: list[dict[str, Any]] = []
            share = self._share(partial(_collect, rows, part))
            self._spare -= (time.monotonic() if attempt else began) - start
            if best is None or share < best[0]:
                best = share, rows
            if share <= LIMIT or self._spare <= 0:
                break
        assert best is not None
        if best[0] > LIMIT:
            self.disturbed.append((name, round(best[0], 3)))
        return best[1]

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Looks at a part that is not repeated."""
        before, start = clock(), time.monotonic()
        yield
        share = others(before, clock(), self._cores, time.monotonic() - start)
        if share > LIMIT:
            self.disturbed.append((name, round(share, 3)))

    def _wait(self) -> None:
        """Until others are quiet, or a fifth of the time to spare is over."""
        end = time.monotonic() + self._spare / 5
        while time.monotonic() < end and self._share(lambda: time.sleep(_LOOK)) > LIMIT:
            pass

    def _share(self, part: Callable[[], None]) -> float:
        before, start = clock(), time.monotonic()
        part()
        return others(before, clock(), self._cores, time.monotonic() - start)
