"""Rows whose rounds are far apart: their median says little."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.harness.timing.rows import Row

APART = 1.2
"""So many times the shortest round, the longest one is worth a line. Rounds of one process are
within 1.1 times each other."""


def unsteady(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """A line for each of them.

    Args:
        rows: with ``seconds_least`` and ``seconds_most`` of their rounds.
        name: of a row, in words.
    """
    return [
        f"{name(row)}: rounds took {row['seconds_least']:.3f} to {row['seconds_most']:.3f} s, so"
        " their median is by chance; a trace says where the time goes"
        for row in rows
        if row["seconds_most"] > APART * row["seconds_least"]
    ]
