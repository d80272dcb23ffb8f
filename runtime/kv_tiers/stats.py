"""What a level of the KV cache has done, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.3
"""Weight of the newest measurement."""
_HOPE = 1.1
"""By which a rate is raised each time that it was too low: a disk that was busy once is asked
again."""


@dataclass(slots=True)
class LevelStats:
    """Counts of one level since the engine began: blocks, their bytes, and seconds."""

    read: int = 0
    """Blocks that came from it into pages of the device."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    missed: int = 0
    """Blocks that prompts could have used and it did not have."""
    declined: int = 0
    """Blocks that it had, and that were faster to compute than to read."""
    damaged: int = 0
    """Blocks that were not what they should be, and are removed."""
    written: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    dropped: int = 0
    """Blocks that were to be written when their pages were needed, or could not be."""
    failed: int = 0
    """Errors of the disk."""


@dataclass
class Rate:
    """Something a second, smoothed over measurements; 0: unknown."""

    value: float = 0.0

    def record(self, amount: float, seconds: float) -> None:
        """So much took so long."""
        if seconds > 0:
            new = amount / seconds
            self.value = new if not self.value else self.value + _SMOOTHING * (new - self.value)

    def seconds(self, amount: float) -> float | None:
        """That so much takes; None: unknown."""
        return amount / self.value if self.value else None

    def hope(self) -> None:
        """It was too low to be used."""
        self.value *= _HOPE
