"""What a step is of."""

from __future__ import annotations

from dataclasses import dataclass

from .routing import Routing


@dataclass(frozen=True)
class Load:
    """What a step is of.

    Attributes:
        tokens, context: see ``planning.work``; ``sequences``: whose caches it reads.
        routing: by which experts are chosen.
        drafts: tokens of each sequence that the step verifies, besides the one that it has.
    """

    tokens: int = 1
    context: int = 0
    sequences: int = 1
    routing: Routing = Routing()
    drafts: int = 0

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one token, and its drafts."""
        return self.tokens == self.logits

    @property
    def logits(self) -> int:
        """Rows of logits that are needed."""
        return self.sequences * (1 + self.drafts)
