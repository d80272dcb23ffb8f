"""Figures over those of the first of their kind, as the paper (OSDI 2026) normalises them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.timing.rows import Row

FIRST = {"ttft_s": "1P", "tpot_ms": "1D", "total_s": "1P"}
"""Of Figure 18: by column, the load that is 1."""


def shares(rows: Sequence[Row], row: Row, column: str, named: str, first: object) -> float | None:
    """A row's figure over that of the row of the same way where ``named`` is ``first``; None: one
    of them is not there."""
    ones = [each for each in rows if each["way"] == row["way"] and each.get(named) == first]
    if not ones or column not in row or column not in ones[0]:
        return None
    return float(row[column] / ones[0][column])
