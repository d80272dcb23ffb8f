"""Speculative decoding: tokens that a step yields by how often drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drafts:
    """Drafts of a sequence in a step (arXiv 2211.17192).

    Attributes:
        count: how many; ``acceptance``: the chance of each to be what the model draws, if all
            before it were.
        seconds: of making one: of a draft model's step, or 0 for prompt lookup.
    """

    count: int
    acceptance: float
    seconds: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens that a step yields on average: those that are accepted, and one of the model."""
        return sum(self.acceptance**i for i in range(self.count + 1))

    def seconds_a_token(self, verifying: float) -> float:
        """Seconds of a token.

        Args:
            verifying: of the model's step of ``1 + count`` tokens of a sequence, as simulated by a
                ``Load`` with so many drafts.
        """
        return (verifying + self.count * self.seconds) / self.tokens
