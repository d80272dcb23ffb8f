"""What a comparison with the reference says; apart from ``check``, which imports torch."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = 1, 5, 40
"""Tokens of the calls: a tile of one, several tiles, and where there is one the GEMM."""


@dataclass(frozen=True)
class Checked:
    """The call that came nearest to its bound, or went beyond it.

    Attributes:
        tokens: of that call.
        error: |y - truth| / |truth| (Frobenius), NaN where y has one.
        bound: what sums in float32 allow, and ties of ``h`` that they turn.
    """

    tokens: int
    error: float
    bound: float

    @property
    def right(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound
