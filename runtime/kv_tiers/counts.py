"""What levels have done, how fast they are, and for which it pays to write a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .stats import LevelStats, Rate


class Counts:
    """Of all levels, the nearest first.

    Args:
        levels: their names; ``page_bytes``: of a page.

    Attributes:
        stats: by name.
        page_seconds: that computing a page takes; None: unknown.
    """

    def __init__(self, levels: Iterable[str], page_bytes: int) -> None:
        self.stats = {name: LevelStats() for name in levels}
        self._rates = {name: Rate() for name in self.stats}
        self._page_bytes = page_bytes
        self.page_seconds: float | None = None

    @property
    def first(self) -> LevelStats:
        """Of the nearest level, into which pages are copied."""
        return next(iter(self.stats.values()))

    @property
    def last(self) -> LevelStats:
        """Of the last level, which has what any has."""
        return list(self.stats.values())[-1]

    def seconds(self, nbytes: Mapping[str, int]) -> float | None:
        """Seconds that reading so many bytes of each level takes; None: unknown."""
        each = [self._rates[level].seconds(n) for level, n in nbytes.items() if n]
        return None if None in each else sum(s for s in each if s is not None)

    def last_seconds(self, pages: int) -> float | None:
        """Seconds that reading so many pages from the last level takes; None: unknown."""
        return list(self._rates.values())[-1].seconds(pages * self._page_bytes)

    def pays(self, level: str) -> bool:
        """Whether a page is worth writing there: reading it again is not known to take longer than
        computing it."""
        reads, computes = self._rates[level].seconds(self._page_bytes), self.page_seconds
        return reads is None or computes is None or reads <= computes

    def hope(self) -> None:
        """Some were too slow to be used: they may have been busy."""
        for rate in self._rates.values():
            rate.hope()

    def hope_to_write(self) -> None:
        """The same, of those alone to which nothing was written for that."""
        for level, rate in self._rates.items():
            if not self.pays(level):
                rate.hope()

    def has_read(self, level: str, nbytes: int, seconds: float) -> None:
        """A block came from there."""
        stats = self.stats[level]
        stats.read += 1
        stats.read_bytes += nbytes
        stats.read_seconds += seconds
        self._rates[level].record(nbytes, seconds)

    def has_written(self, level: str, nbytes: int, seconds: float, blocks: int = 1) -> None:
        """So many went there."""
        stats = self.stats[level]
        stats.written += blocks
        stats.written_bytes += nbytes
        stats.write_seconds += seconds
